"""What every service needs around its decisions: settings, telemetry, tasks, shutdown."""
