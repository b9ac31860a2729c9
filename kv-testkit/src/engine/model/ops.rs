//! The arithmetic: products, norms and the exponential.
//!
//! Every function here fixes the order of its additions, and none looks at how many rows it is given: the
//! bits of a row depend on that row alone. The loops run over [`LANES`] independent sums at a time, which the
//! compiler turns into vector instructions without changing the order within a sum.

/// Independent sums computed side by side.
pub(super) const LANES: usize = 16;

/// [`LANES`] numbers that are worked on together.
pub(super) type Lanes = [f32; LANES];

/// A matrix, `[outputs][inputs]`, laid out for products: panels of [`LANES`] outputs, within a panel input
/// after input. The last panel is filled up with zeros.
#[derive(Debug, Clone, Default)]
pub(super) struct Packed {
    outputs: usize,
    inputs: usize,
    data: Vec<f32>,
}

impl Packed {
    /// Packs `outputs` rows of `matrix` from `first_row` on, and of these `inputs` columns from
    /// `first_column` on. `width` is the length of a row of `matrix`.
    pub(super) fn cut(
        matrix: &[f32],
        width: usize,
        (first_row, outputs): (usize, usize),
        (first_column, inputs): (usize, usize),
    ) -> Self {
        let panel = inputs * LANES;
        let mut data = vec![0.0; outputs.div_ceil(LANES) * panel];
        let rows = matrix.chunks_exact(width).skip(first_row).take(outputs);
        for (output, row) in rows.enumerate() {
            let base = output / LANES * panel + output % LANES;
            for (input, &value) in row.iter().skip(first_column).take(inputs).enumerate() {
                data[base + input * LANES] = value;
            }
        }
        Self { outputs, inputs, data }
    }

    /// Multiplies rows by the matrix: `y[row][output]` is the sum over `input` of
    /// `x[row][input] * matrix[output][input]`, added up in the order of the inputs.
    ///
    /// Rows of `x` start every `x_stride` numbers and may be longer than `inputs`; rows of `y` are
    /// `outputs` long and lie one after another. There are as many rows as fit into `y`.
    pub(super) fn multiply(&self, x: &[f32], x_stride: usize, y: &mut [f32]) {
        let (outputs, inputs) = (self.outputs, self.inputs);
        for (index, panel) in self.data.chunks_exact(inputs * LANES).enumerate() {
            let first = index * LANES;
            let width = LANES.min(outputs - first);
            let mut pairs = y.chunks_exact_mut(2 * outputs);
            let mut at = 0;
            for pair in &mut pairs {
                let rows = [&x[at..at + inputs], &x[at + x_stride..at + x_stride + inputs]];
                let [upper, lower] = sums(rows, panel);
                pair[first..first + width].copy_from_slice(&upper[..width]);
                pair[outputs + first..outputs + first + width].copy_from_slice(&lower[..width]);
                at += 2 * x_stride;
            }
            for row in pairs.into_remainder().chunks_exact_mut(outputs) {
                let [only] = sums([&x[at..at + inputs]], panel);
                row[first..first + width].copy_from_slice(&only[..width]);
                at += x_stride;
            }
        }
    }
}

/// For each of `ROWS` rows and each lane, the sum over `i` of `row[i] * panel[i][lane]`, from the first `i`
/// to the last. Rows and panel must agree in length; what is beyond the shorter is left out.
#[inline(always)]
pub(super) fn sums<const ROWS: usize>(rows: [&[f32]; ROWS], panel: &[f32]) -> [Lanes; ROWS] {
    let (panel, _) = panel.as_chunks::<LANES>();
    let len = rows.iter().fold(panel.len(), |len, row| len.min(row.len()));
    let panel = &panel[..len];
    let rows = rows.map(|row| &row[..len]);
    let mut totals = [[0.0; LANES]; ROWS];
    for (i, weights) in panel.iter().enumerate() {
        for (total, row) in totals.iter_mut().zip(rows) {
            let factor = row[i];
            for (sum, &weight) in total.iter_mut().zip(weights) {
                *sum += factor * weight;
            }
        }
    }
    totals
}

/// Adds the lanes: the two halves lane by lane, then the halves of that, down to one number.
pub(super) fn fold_sum(mut lanes: Lanes) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// The largest lane.
pub(super) fn fold_max(mut lanes: Lanes) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = larger(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// The larger of two numbers; unlike `f32::max` a single instruction, at the price of NaN being passed on or
/// not depending on its place.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// Below this, [`exp`] gives zero: the result would not be a normal number.
const EXP_MIN: f32 = -87.0;
/// Above this, [`exp`] gives what it gives here.
const EXP_MAX: f32 = 88.0;

/// The exponential, to about 1e-7 relative.
///
/// Written out because the standard library's calls into the platform: that differs from machine to machine,
/// and is not vectorised.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding this to a small number leaves the number, rounded to an integer, in the lowest bits.
    const ROUNDER: f32 = 12_582_912.0;
    // ln 2 in two parts: the first has so few bits that its multiples are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = larger(EXP_MIN, if x < EXP_MAX { x } else { EXP_MAX });
    let shifted = clamped * std::f32::consts::LOG2_E + ROUNDER;
    let power = shifted - ROUNDER;
    let rest = (clamped - power * LN2_HIGH) - power * LN2_LOW;
    // Taylor's series to the seventh power; |rest| is at most ln 2 / 2, so the next term is below 6e-9.
    let mut series = 1.0 / 5040.0;
    series = series * rest + 1.0 / 720.0;
    series = series * rest + 1.0 / 120.0;
    series = series * rest + 1.0 / 24.0;
    series = series * rest + 1.0 / 6.0;
    series = series * rest + 0.5;
    series = series * rest + 1.0;
    series = series * rest + 1.0;
    let scale = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < EXP_MIN { 0.0 } else { series * scale }
}

/// Divides a row by the root of its mean square and multiplies it by `gain`: RMSNorm. All three slices have
/// the same length.
pub(super) fn rms_norm(row: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
    let (chunks, tail) = row.as_chunks::<LANES>();
    let mut squares = [0.0; LANES];
    for chunk in chunks {
        for (sum, &value) in squares.iter_mut().zip(chunk) {
            *sum += value * value;
        }
    }
    let mut total = fold_sum(squares);
    for &value in tail {
        total += value * value;
    }
    let factor = 1.0 / (total / row.len() as f32 + eps).sqrt();
    for ((out, &value), &gain) in out.iter_mut().zip(row).zip(gain) {
        *out = value * factor * gain;
    }
}

/// The gate of the feed-forward layer: `gate = gate * sigmoid(gate) * up`, number by number.
pub(super) fn gate_with_silu(gate: &mut [f32], up: &[f32]) {
    for (gate, &up) in gate.iter_mut().zip(up) {
        let x = *gate;
        *gate = x / (1.0 + exp(-x)) * up;
    }
}

/// Turns the pairs `(row[i], row[half + i])` by the angles whose cosines and sines are given; `half` is the
/// length of `cos` and of `sin`.
pub(super) fn rotate(row: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = row.split_at_mut(cos.len());
    for (((low, high), &cos), &sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        let (a, b) = (*low, *high);
        *low = a * cos - b * sin;
        *high = b * cos + a * sin;
    }
}

/// Index of the largest number, the lowest where several are equal. NaN never wins; of nothing it is 0.
pub(super) fn argmax(values: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (index, &value) in (0..).zip(values) {
        if value > best.1 {
            best = (index, value);
        }
    }
    best.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect()
    }

    #[test]
    fn products_are_those_of_the_plain_loop_to_the_bit() {
        for (outputs, inputs, rows) in [(1, 1, 1), (16, 8, 2), (17, 5, 3), (40, 64, 7), (3, 33, 4)] {
            let (width, stride) = (inputs + 3, inputs + 2);
            let matrix = numbers((outputs + 2) * width);
            let x = numbers(rows * stride);
            let packed = Packed::cut(&matrix, width, (1, outputs), (2, inputs));
            let mut y = vec![f32::NAN; rows * outputs];
            packed.multiply(&x, stride, &mut y);
            for row in 0..rows {
                for output in 0..outputs {
                    let mut sum = 0.0;
                    for input in 0..inputs {
                        sum += x[row * stride + input] * matrix[(output + 1) * width + input + 2];
                    }
                    assert_eq!(y[row * outputs + output].to_bits(), f32::to_bits(sum));
                }
            }
        }
    }

    #[test]
    fn the_exponential_is_accurate_and_ends_in_zero() {
        let mut worst = 0.0_f64;
        for i in -87_000..=87_000 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / exact - 1.0).abs());
        }
        assert!(worst < 2e-7, "{worst}");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::INFINITY).is_finite());
    }

    #[test]
    fn norm_gate_and_rotation_compute_their_formulas() {
        let row = numbers(37);
        let gain = vec![2.0; 37];
        let mut out = vec![0.0; 37];
        rms_norm(&row, &gain, 0.0, &mut out);
        let mean_square = out.iter().map(|x| x * x).sum::<f32>() / 37.0;
        assert!((mean_square - 4.0).abs() < 1e-4, "{mean_square}");

        let mut gate = [1.0, -2.0];
        gate_with_silu(&mut gate, &[3.0, 0.5]);
        assert!((gate[0] - 3.0 * 0.731_058_6).abs() < 1e-6 && (gate[1] + 0.119_202_92).abs() < 1e-6);

        let mut row = [1.0, 0.0, 0.0, 1.0];
        rotate(&mut row, &[0.0, 1.0], &[1.0, 0.0]);
        assert_eq!(row, [0.0, 0.0, 1.0, 1.0]);
    }

    #[test]
    fn the_lowest_id_wins_a_tie() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0, f32::NAN, 2.0]), 1);
        assert_eq!(argmax(&[f32::NAN, f32::NEG_INFINITY]), 0);
        assert_eq!(argmax(&[]), 0);
    }

    #[test]
    fn lanes_fold_to_their_sum_and_maximum() {
        let lanes: Lanes = std::array::from_fn(|i| i as f32);
        assert_eq!(fold_sum(lanes), 120.0);
        assert_eq!(fold_max(lanes), 15.0);
    }
}
