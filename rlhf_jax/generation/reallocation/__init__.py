"""Move running samples between slices: remaining lengths, the choice of moves, and the transfer.

Tuning constants are at the top of the file that reads them, each with its origin. "By hand" means
that no benchmark swept the constant; their joint effect is measured by:

    python benchmarks/makespan.py --slices 64 --samples 64 --acceptance 0.7 --prediction noisy:0.5
    python benchmarks/moves.py
"""
