"""Do the tests fail where the code is wrong?  Small defects are put into the ops and kernels, one at a time.

    python -m tests.mutation kernels/max_pool.py --sample 5     five defects of one file
    python -m tests.mutation --sample 140 --slow                140 among all; what survives is tried on slow tests too

Each defect is tried in a copy of the checkout, on the tests that belong to its file.  The same seed gives the same
defects as long as the sources are the same.
"""
