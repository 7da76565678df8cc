"""The Scheduler: owns Triton workers and runs attempts on them."""
