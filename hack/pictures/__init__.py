"""Pictures of `kubectl moontide` under docs/pictures, made from what it read in a real run."""
