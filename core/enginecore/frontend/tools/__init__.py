"""Calls of functions: how models write them (data), how what they write is taken apart, and how it is forced."""
