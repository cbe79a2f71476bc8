"""What people run: the ``kvq`` command, its demo, evaluation and assets."""
