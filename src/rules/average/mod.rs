//! Averages of weights, beside the rules that move them.

list! {
    lookahead::Lookahead, "every k-th step: slow += α·(x - dx - slow); dx' = x - slow", "Zhang et al. 2019, arXiv 1907.08610";
    ema::Ema, "dx' = dx; average = δ·average + (1 - δ)·(x - dx)", "exponential moving average of the weights";
    uniform_average::UniformAverage, "dx' = dx; average = mean of x - dx", "Polyak & Juditsky 1992; Izmailov et al. 2018, arXiv 1803.05407";
}
