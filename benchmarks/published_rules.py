"""Published rules for adaptive thresholds, reimplemented from their papers and code. Each names its source.

For each step in order, `after(norm)` returns the norm after clipping: NaN if the rule passes NaN on, and 0 if it skips
the step. `limit` is the largest norm that the rule would not have changed at that step. If a rule works on each tensor
of a model, the model has one tensor here.
"""

import bisect
import math
from collections import deque

import numpy as np

import gradclip


class Fixed:
    """A well-chosen fixed threshold: twice the usual norm. NaN passes, as in torch.nn.utils.clip_grad_norm_."""

    name = "fixed, chosen well"

    def __init__(self, limit=1.0):
        self.limit = limit

    def after(self, norm):
        return clipped(norm, self.limit)


class Ours:
    """gradclip.QuantileRule with its defaults and nonfinite="drop"."""

    name = "QuantileRule"

    def __init__(self, rule=None):
        self.rule = gradclip.QuantileRule() if rule is None else rule
        self.history, self.limit = self.rule.init(), math.inf

    def after(self, norm):
        self.limit = float(self.rule.max_norm(self.history))
        self.history = self.rule.observe(self.history, norm)
        return clipped(norm, self.limit) if math.isfinite(norm) else 0.0


class OursBySpread(Ours):
    """gradclip.SpreadRule, the default of gradclip.AdaptiveThreshold, and nonfinite="drop"."""

    name = "SpreadRule"

    def __init__(self):
        super().__init__(gradclip.SpreadRule())


class AutoClip:
    """The 10th percentile of all norms so far, including this one: Seetharaman et al. 2020, arXiv 2007.14469."""

    name = "AutoClip"

    def __init__(self, percentile=10.0):
        self.share, self.sorted, self.spoiled, self.limit = percentile / 100, [], False, math.inf

    def after(self, norm):
        self.spoiled |= math.isnan(norm)
        if not self.spoiled:
            bisect.insort(self.sorted, norm)
        self.limit = math.nan if self.spoiled else quantile(self.sorted, self.share)
        return clipped(norm, self.limit)


class ZClip:
    """A z-score of exponential averages that moves outliers nearer to the mean: Kumar et al. 2025, arXiv 2504.02507.

    Code: github.com/bluorion-com/ZClip. Settings: those of the paper, without the additional fixed threshold.
    """

    name = "ZClip"

    def __init__(self, alpha=0.97, z_thresh=2.5, warmup=25, eps=1e-6):
        self.alpha, self.z_thresh, self.warmup, self.eps = alpha, z_thresh, warmup, eps
        self.seen, self.mean, self.var, self.limit = [], None, None, math.inf

    def after(self, norm):
        if self.mean is None:
            self.seen.append(norm)
            if len(self.seen) >= self.warmup:
                self.mean = sum(self.seen) / len(self.seen)
                self.var = sum((x - self.mean) ** 2 for x in self.seen) / len(self.seen)
            return norm
        std = self.var**0.5
        z = (norm - self.mean) / (std + self.eps)
        self.limit = self.mean + self.z_thresh * (std + self.eps)
        left = self.mean + self.z_thresh * std / (z / self.z_thresh) if z > self.z_thresh else norm
        self.mean = self.alpha * self.mean + (1 - self.alpha) * left
        self.var = self.alpha * self.var + (1 - self.alpha) * (left - self.mean) ** 2
        return left


class AdaGC:
    """A multiple of an exponential average of clipped norms: Wang et al. 2025, arXiv 2502.11034, algorithm 1."""

    name = "AdaGC"

    def __init__(self, absolute=1.0, relative=1.05, beta=0.98, warmup=100):
        self.absolute, self.relative, self.beta, self.warmup = absolute, relative, beta, warmup
        self.average, self.step, self.limit = math.inf, 0, absolute

    def after(self, norm):
        self.step += 1
        if self.step <= self.warmup:
            left = clipped(norm, self.absolute)
            self.average = left if math.isnan(left) else min(self.average, left)
            return left
        self.limit = self.relative * self.average
        left = clipped(norm, self.limit)
        self.average = self.beta * self.average + (1 - self.beta) * left
        return left


class OpenSora:
    """Exponential mean and three deviations of the norms that were not clipped: Open-Sora Plan v1.5, arXiv 2412.00131.

    Its code, class AdaptiveGradClipper, raises an error if a norm is not finite, which ends the training.
    """

    name = "Open-Sora Plan"

    def __init__(self, decay=0.99, initial=1.0):
        self.decay, self.limit, self.mean, self.var, self.ended = decay, initial, None, 0.0, False

    def after(self, norm):
        self.ended |= not math.isfinite(norm)
        if self.ended:
            return math.nan
        if self.mean is None:
            self.mean = min(self.limit, 3 * norm)
        self.limit = self.mean + 3 * self.var**0.5
        if norm <= self.limit:
            self.mean = self.decay * self.mean + (1 - self.decay) * norm
            self.var = self.decay * self.var + (1 - self.decay) * (self.mean - norm) ** 2
        return clipped(norm, self.limit)


class Fira:
    """A norm may grow by 1% a step: the limiter of Fira, Chen et al. 2024, arXiv 2410.01623, on the whole norm."""

    name = "Fira"

    def __init__(self, growth=1.01):
        self.growth, self.last, self.limit = growth, None, math.inf

    def after(self, norm):
        if self.last is None:
            self.last = norm
            return norm
        self.limit = self.growth * (self.last + 1e-8)
        ratio = norm / (self.last + 1e-8)
        # Python's max keeps a NaN that comes first.
        self.last = norm / (max(ratio, self.growth) / self.growth)
        return self.last


class SmartClip:
    """Median and three deviations of all norms, after 100 steps: smartclip 0.1.1 of PyPI, AutoClip(mode="auto").

    The median is exact here; smartclip estimates it.
    """

    name = "smartclip"

    def __init__(self, warmup=100):
        self.warmup, self.sorted, self.mean, self.squares, self.limit = warmup, [], 0.0, 0.0, math.inf

    def after(self, norm):
        if math.isfinite(norm):
            kept = max(norm, 1e-8)
            bisect.insort(self.sorted, kept)
            off = kept - self.mean
            self.mean += off / len(self.sorted)
            self.squares += off * (kept - self.mean)
        if len(self.sorted) < self.warmup:
            return norm
        self.limit = quantile(self.sorted, 0.5) + 3 * (self.squares / (len(self.sorted) - 1)) ** 0.5
        return clipped(norm, self.limit)


class SkipStep:
    """Skip steps above mean plus six deviations of the last 128 norms: OLMo-core, SkipStepOptimizer, norms only.

    Described in OLMo et al. 2025, arXiv 2501.00656.
    """

    name = "SkipStep"

    def __init__(self, window=128, sigmas=6.0):
        self.seen, self.window, self.sigmas, self.limit = deque(maxlen=window), window, sigmas, math.inf

    def after(self, norm):
        before = np.array(self.seen, np.float32)
        self.seen.append(norm)
        if len(self.seen) < self.window // 2:
            return norm
        with np.errstate(invalid="ignore"):
            mean, std = before.mean(), before.std(ddof=1)
        self.limit = float(mean + np.float32(self.sigmas) * std)
        return norm if np.float32(norm) - mean <= np.float32(self.sigmas) * std else 0.0


class Icefall:
    """Twice the median of 100 norms, updated every 100 steps: ScaledAdam of icefall (k2-fsa), `_get_clipping_scale`.

    After 10, 20 and 40 steps, it uses twice that value, of the norms so far. Yao et al. 2023, arXiv 2310.11230.
    """

    name = "icefall"

    def __init__(self, scale=2.0, period=100, early=(10, 20, 40)):
        self.scale, self.period, self.early = scale, period, early
        self.norms, self.step, self.limit = np.zeros(period), 0, math.inf

    def after(self, norm):
        step, self.step = self.step, self.step + 1
        if step == 0:
            return norm
        self.norms[step % self.period] = norm
        if step in self.early or step % self.period == 0:
            ordered = np.sort(self.norms)[-step if step in self.early else 0 :]
            scale = self.scale * (2 if step in self.early else 1)
            self.limit = scale * float(ordered[len(ordered) // 4 * 2])
        # Python's min ignores a NaN that comes second. The check for NaN comes too late.
        share = min(1.0, self.limit / (norm + 1e-20))
        return norm * share if share else 0.0


class BitsAndBytes:
    """The 95th of 100 norms, including this one: percentile_clipping=95 of bitsandbytes; Dettmers et al. 2022."""

    name = "bitsandbytes"

    def __init__(self, percentile=95):
        self.percentile, self.norms, self.step, self.limit = percentile, np.zeros(100), 0, math.inf

    def after(self, norm):
        self.step += 1
        if self.step == 1:
            self.norms[:] = norm
        self.norms[self.step % 100] = norm
        self.limit = float(np.sort(self.norms)[self.percentile])
        return self.limit if norm > self.limit else norm


class Trellis:
    """The 95th percentile of 1,000 finite norms, inactive before: AdaptiveGradClipper of TRELLIS, arXiv 2412.01506."""

    name = "TRELLIS"

    def __init__(self, percentile=95.0, window=1000):
        self.share, self.window, self.seen, self.sorted = percentile / 100, window, deque(), []
        self.limit = self.next = math.inf

    def after(self, norm):
        self.limit = self.next
        if math.isfinite(norm):
            self.seen.append(norm)
            bisect.insort(self.sorted, norm)
            if len(self.seen) > self.window:
                self.sorted.pop(bisect.bisect_left(self.sorted, self.seen.popleft()))
            if len(self.seen) == self.window:
                self.next = quantile(self.sorted, self.share)
        return clipped(norm, self.limit)


RULES = [
    *(
        Ours,
        OursBySpread,
        Fixed,
        AutoClip,
        ZClip,
        AdaGC,
        OpenSora,
        Fira,
        SmartClip,
        SkipStep,
        Icefall,
        BitsAndBytes,
        Trellis,
    ),
]


def clipped(norm, limit):
    """Return the norm after clipping: the norm, the threshold, or NaN if either is NaN."""
    return math.nan if math.isnan(norm) or math.isnan(limit) else min(norm, limit)


def quantile(ordered, share):
    """Return a quantile like numpy.percentile, interpolated between two sorted numbers."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
