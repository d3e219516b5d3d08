"""Every decision of the consistency protocol, without I/O: see :mod:`moontide.planning.protocol`."""
