"""The Protocols of live engines, and `Backend`, the spec that builds one."""
