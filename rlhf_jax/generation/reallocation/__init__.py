"""Move running samples between slices: how long they last, what to move, and the move.

Tuning figures stand at the top of the file that reads them, each with what chose it. "By hand"
means that no benchmark swept the figure; what they give together is shown by:

    python benchmarks/makespan.py --slices 64 --samples 64 --acceptance 0.7 --prediction noisy:0.5
    python benchmarks/moves.py
"""
