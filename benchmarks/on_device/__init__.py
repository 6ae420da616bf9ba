"""The parts of `device_check.py`: what it measures, each in a file of its own."""
