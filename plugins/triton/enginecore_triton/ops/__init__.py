"""One op a file: kernel, launcher, `supports(query, device)`, and `aot_cases()` for the ahead-of-time compiler."""
