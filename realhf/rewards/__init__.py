"""Floor 3: verdicts on answers. Untrusted or slow code runs in killable child processes, never in a worker."""
