"""Sampling: what a request asks for (`params.py`), its random numbers (`random_numbers.py`), one row's choice (`draw.py`)
and the rows of a step (`sampler.py`). Only the last needs torch."""
