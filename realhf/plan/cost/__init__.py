"""Time and memory of instructions: machine models, measured profiles, pipeline schedules."""
