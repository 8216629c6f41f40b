"""The loop: plan, execute, update; the process around it and the channel to the frontend."""
