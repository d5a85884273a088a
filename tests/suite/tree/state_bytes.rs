//! The guide's table of bytes per parameter, from real states.

use candle_core::DType::{self, BF16, F16, F32};
use candle_core::Device;
use optimisers::{
    AccumGrad, Adam, Kahan, MixedPrecision, Optimiser, OptimiserChain, Q8, Rule, SplitMaster, StateTree,
    StochasticRounding, StoreAs, setup, update,
};

use support::common::{Grads, Vars, grads, model, random};

const PARAMETERS: usize = 12_800;
const KEEPERS: [&str; 6] = [
    "the rule alone",
    "`MixedPrecision`",
    "`SplitMaster`",
    "`SplitMaster::of_24_bits`",
    "`Kahan`",
    "`StochasticRounding`",
];
const HEAD: [&str; 2] = [
    "| Parameters | Kept by | Adam | Adam, m in bf16 | Adam in 8 bits | AccumGrad, Adam | AccumGrad in \
     bf16, Adam |",
    "| --- | --- | --- | --- | --- | --- | --- |",
];

/// The columns of the table.
fn rules() -> [Box<dyn Rule>; 5] {
    let accumulating = OptimiserChain::new((AccumGrad::new(2), Adam::new(0.1)));
    [
        Box::new(Adam::new(0.1)),
        Box::new(StoreAs::new([("m", BF16)], Adam::new(0.1))),
        Box::new(StoreAs::all(Q8, Adam::new(0.1))),
        Box::new(accumulating.clone()),
        Box::new(StoreAs::new([("acc", BF16)], accumulating)),
    ]
}

fn parameters(dtype: DType) -> Vars {
    model(&[random(0, &[PARAMETERS], dtype, &Device::Cpu)])
}

fn gradients(dtype: DType) -> Grads {
    grads([Some(random(1, &[PARAMETERS], dtype, &Device::Cpu))])
}

/// The bytes of all tensors of a model and of a state.
fn held(model: &Vars, state: &StateTree) -> usize {
    model
        .values()
        .map(|x| x.elem_count() * x.dtype().size_in_bytes())
        .sum::<usize>()
        + state.bytes()
}

/// Bytes per parameter after two steps, or a dash for what `setup` refuses.
fn cell(keeper: &str, dtype: DType, rule: Box<dyn Rule>) -> String {
    let low = parameters(dtype);
    let optimiser: Optimiser = match keeper {
        "`MixedPrecision`" => Optimiser::new(MixedPrecision::new(F32, rule)),
        "`SplitMaster`" => Optimiser::new(SplitMaster::new(rule)),
        "`SplitMaster::of_24_bits`" => Optimiser::new(SplitMaster::of_24_bits(rule)),
        "`Kahan`" => Optimiser::new(Kahan::new(rule)),
        "`StochasticRounding`" => Optimiser::new(StochasticRounding::new(0, rule)),
        _ => Optimiser::new(rule),
    };
    let Ok(mut state) = setup(optimiser, &low) else {
        return "–".to_string();
    };
    (0..2).for_each(|_| _ = update(&mut state, &low, &gradients(dtype)).expect("an update"));
    per_parameter(held(&low, &state))
}

fn per_parameter(bytes: usize) -> String {
    let each = bytes as f64 / PARAMETERS as f64;
    if bytes.is_multiple_of(PARAMETERS) {
        format!("{each}")
    } else {
        format!("{each:.2}")
    }
}

#[test]
fn the_table_says_what_states_take() {
    let row = |(dtype, keeper): (DType, &str)| {
        let cells: Vec<String> = rules()
            .into_iter()
            .map(|rule| cell(keeper, dtype, rule))
            .collect();
        format!("| {} | {keeper} | {} |", dtype.as_str(), cells.join(" | "))
    };
    let combinations = [BF16, F16, F32]
        .into_iter()
        .flat_map(|dtype| KEEPERS.map(|keeper| (dtype, keeper)));
    let expected: Vec<String> = HEAD
        .map(str::to_string)
        .into_iter()
        .chain(combinations.map(row))
        .collect();
    let readme = include_str!("../../../src/guide/memory.md");
    let section = readme.lines().skip_while(|line| *line != "# Bytes per parameter");
    let table: Vec<&str> = section
        .skip_while(|line| !line.starts_with('|'))
        .take_while(|line| line.starts_with('|'))
        .collect();
    assert_eq!(table, expected, "the table should be\n{}\n", expected.join("\n"));
}
