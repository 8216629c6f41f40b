"""Executors: how a plan reaches the workers that run it."""
