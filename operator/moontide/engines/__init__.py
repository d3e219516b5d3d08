"""The one way out to engines and wipers: an HTTP client of one replica, and a bounded fan-out over many."""
