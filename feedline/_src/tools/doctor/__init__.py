"""Checks a machine, and a training job, for known troubles of JAX: `feedline doctor` and `feedline diagnose`."""
