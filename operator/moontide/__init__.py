"""Moontide: policy-consistent KV caching for vLLM fleets on Kubernetes."""
