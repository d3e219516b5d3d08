"""An HTTP hook for trainers that have no credentials of the cluster's API server (docs/trainers.md)."""
