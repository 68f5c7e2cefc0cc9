"""Reward operators: functions, reward models and judges."""
