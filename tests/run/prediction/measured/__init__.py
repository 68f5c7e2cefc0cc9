"""Tests of ``flowrl/run/prediction/measured``."""
