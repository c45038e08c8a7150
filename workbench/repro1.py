import sys; sys.path.insert(0, "tools")
from compose import compose
n = lambda x: f"nbs/reproduction/{x}.ipynb"
S, P, Q, L, A = n("02_statistics"), n("28_pairs"), n("31_equivalence"), n("34_sequential"), n("35_aggregates")
compose(n("00_statistics"), "reproduction.statistics", """
# Statistics: paired differences, margins, error rates
> Two methods on the same seeds are compared by their paired differences; a claim holds, fails, is the same within a margin, or stays open.

Two settings are trained on the same seeds, so their scores are paired. For the differences $d_i = a_i - b_i$ over $n$
seeds, the $t$ interval of the mean is

$$\\bar d \\pm t_{n-1,\\,0.975}\\; \\frac{\\hat\\sigma_d}{\\sqrt n}.$$

The notebook goes from one difference to one claim, to claims that are tested more than once, to many claims, and to
aggregates over tasks. SciPy has the tests; what is here combines them.
""", """
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from typing import Protocol

import numpy as np
from scipy.optimize import brentq
from scipy.stats import bootstrap, false_discovery_control, mannwhitneyu, nct, trim_mean, ttest_1samp
from scipy.stats import t as student

from branchgrpo.registry import unknown
""", """
from math import sqrt

from fastcore.test import test_close, test_eq, test_fail
from scipy.stats import norm, t, ttest_rel
""", [
"## A difference\nIts standard error and degrees of freedom give an interval and p values.",
(P, "cf211deb"), (P, "d215c852"),
"## Two methods on the same seeds\nA claim such as \"A loses less than a fifth of the baseline's gain\" has a margin whose size is not known: the baseline's gain varies between seeds, as A does. So a margin $m$ enters the test seed by seed. With the scores $a_s$ and $o_s$ of both methods, and $b_s$ of the baseline, on seed $s$:\n\n$$w_s = a_s - o_s + m\\,b_s, \\qquad t = \\bar w \\,\\Big/\\, \\frac{\\mathrm{sd}(w)}{\\sqrt n}, \\qquad n - 1 \\text{ degrees of freedom}.$$\n\nIf the mean of $w$ is above zero, A loses less than $m$ times the baseline. The test takes no noise from other methods.",
(P, "2550b28d"), (P, "439ec9c4"),
"Why the margin is measured: invented studies of 20 seeds, in which A loses exactly a fifth of the baseline. Seeds differ much, and methods on one seed little. A test that takes the baseline's mean for granted calls the loss smaller than a fifth far too often; ours keeps its rate.",
(P, "283c07b9"),
"## Four answers to a claim\n\"No difference was seen\" is no answer: perhaps nobody could have seen it. With a margin that is stated *before* the runs, \"the same\" can be shown like any other claim, by two one-sided tests (TOST, Schuirmann 1987): the difference is above $-m$, and it is below $m$, each at 5 %. To test \"above\", \"below\" and \"the same\" of one difference together needs no correction: whichever value is true, at most one side of it can be denied wrongly (Goeman, Solari and Stijnen 2010, three-sided testing).\n\nA claim has a kind: *above* (a difference above 0), *not below* (above $-m$: \"without loss\"), or *same* (within $\\pm m$).",
(Q, "f3758555"), (Q, "e3e6506f"), (Q, "d79dc2dc"), (Q, "5c5c14b6"), (Q, "e4111c6e"),
"A difference may be above zero and yet within the margin. The first answer that is shown counts.",
(Q, "5a71e004"), (Q, "5a71e005"), (Q, "a90324f6"), (Q, "0487f3ae"),
(Q, "4d2c0cc8", [("## A documented example\n", "A documented example: ")]), (Q, "210b9b90"),
"## What an open claim would take\nTwo numbers stand beside an open claim. The smallest effect: the true difference that would have been seen with probability 0.8. And the seeds: how many would show a difference as large as the margin, *and* show \"the same\" if there is none. With $k$ methods on $n$ seeds, the error is $\\tau\\sqrt{2/n}$ with $(k-1)(n-1)$ degrees of freedom.",
(Q, "a82a3dcf"), (Q, "4ee5813a"), (Q, "1acfe40a"), (Q, "a3f4562d"), (Q, "2f41ea1c"), (Q, "717d2f9e"), (Q, "caf14182"), (Q, "db5410b8"), (Q, "47428a33"), (Q, "77c85e14"),
"## Intervals and verdicts of pages\nPages without a registration say whether a difference is above zero, below zero, or neither can be said. SciPy computes the interval. Equal values give an interval of width zero, about which SciPy warns.",
(S, "9921ed56"), (S, "32b506c5"), (S, "b0002b04"),
"Many claims are that two settings are the same. They need a margin: here a tenth of what the other setting gains, measured seed by seed.",
(S, "013e1ecd"), (S, "89b3e93c"), (S, "dff713a3"), (S, "e4cb5d15"), (S, "e52c1c69"), (S, "a3f599d0"), (S, "102e32da"), (S, "5027efa1"), (S, "248f3028"), (S, "a1517712"), (S, "3dfc4369"),
"Of twenty claims without any truth one holds by chance. Benjamini and Hochberg's procedure bounds the share of false ones among those that are decided.",
(S, "172d5475"), (S, "55432e91"),
(S, "74da1bd5"), (S, "8cfcd3c9"), (S, "e69ee5c0"),
"## Sequential testing\nIf one tests at 5 % after every new seed, one finds something in the end: with five looks the chance of a wrong answer is about 14 %. So the looks are fixed beforehand, and each spends a share of $\\alpha$. With $t_k$ the part of all seeds at look $k$, the shares follow the power family of Kim and DeMets (1987), $\\alpha(t) = \\alpha\\, t^2$:\n\n$$\\alpha_k = \\alpha\\,(t_k^2 - t_{k-1}^2),\\qquad \\sum_k \\alpha_k = \\alpha.$$\n\nAt a look each of the $m$ registered claims has the share $\\alpha_k / m$, decided or not, run or not. The chance of any wrong answer is at most the sum of all shares, whatever their correlations (Bonferroni). A step-down procedure such as Holm's would not do: a claim has several possible answers, and one that is decided as \"the same\" still is a true null hypothesis of \"holds\".",
(L, "a5ec3432"), (L, "63e2a74e"), (L, "60463d23"), (L, "d00a736c"), (L, "b95f344a"), (L, "cbec909b"), (L, "856de70e"), (L, "c3f904d0"),
"## Aggregates over tasks\nOne claim is about one reward and one family. To say how a method does over many *tasks* (a reward with a family), Agarwal et al. (2021, `rliable`) propose three numbers that no outlier rules: the interquartile mean (the mean of the middle half of all scores), the probability of improvement (how often a run of $X$ beats a run of $Y$ on the same task) and the performance profile (the share of runs above a score $\\tau$, for all $\\tau$).",
("code", "#| export\nTasks = dict[str, Sequence[float]]  # of each task, the scores of a method's seeds"),
(A, "171a23a2"), (A, "874b1f7d"), (A, "fa5ea956"), (A, "22c855d6"), (A, "fe89b502"), (A, "a4395507"),
"Their intervals come from a stratified bootstrap: seeds are drawn again within each task.",
(A, "1430ba60", [("class Estimate", "class Interval"), ("-> Estimate:", "-> Interval:"), ("return Estimate(", "return Interval(")] ), (A, "227486d3"), (A, "d3e9d84d"),
"At each threshold, the middle 95 % of the profiles of redrawn seeds:",
(A, "d32d27ce"), (A, "6de8a4d4"),
"**Change this, and see it break.** In `equivalence_p` take the smaller of the two p values: one side is then enough, the sleep data are \"the same\", and the comparison with SciPy fails. In `sequence` give every look the whole `alpha`: wrong answers come about twice as often as registered.",
])
