"""Do the tests fail where the code is wrong?  Small defects are put into the ops and kernels, one at a time.

    python -m tests.mutation                                one defect in each file: about an hour on one core
    python -m tests.mutation --each 3 --seed 7 kernels      three in each file of one folder
    python -m tests.mutation --sample 140 --slow            140 among all; what survives is tried on slow tests too

Each defect is tried in a copy of the checkout, on the tests that belong to its file.  The same seed gives the same
defects as long as the sources are the same, so that two states of the tests can be compared (``--tests FOLDER``).
"""
