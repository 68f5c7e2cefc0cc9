"""Run a plan on Ray: places, hosts, the wire format, and the runner. Only this package imports Ray."""
