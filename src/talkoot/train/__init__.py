"""The training job. Start reading at `loop.py`."""
