"""What must hold on a GPU, as one script: `python -m tests.gpu`, or `pytest tests/gpu` where there is a pytest."""
