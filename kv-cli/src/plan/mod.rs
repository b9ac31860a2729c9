//! `kvx plan`: whether two engines fit, and who would read what from whom.

mod example;
mod file;
mod report;
mod sketch;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use self::file::Shape;
use crate::error::Failure;

/// Below the options.
const HELP: &str = "\
Takes two shape files, which describe an engine each, and compiles them with the code that the workers use when they
meet. Nothing is started and nothing is read.

The picture shows for each rank of D the ranks of P that it has to do with, and which layers and heads it reads from
them. The table has bytes, and for a sample prompt the pieces that are read and the ranges that they are joined to:
where blocks lie one after the other on both sides, and where they are scattered.

The exit code is 0 if the engines fit, 1 if not (the sentence says why, with both sides' values), and 2 if a file cannot
be used.";

/// What can be asked for.
#[derive(Args)]
#[command(after_help = HELP)]
pub(crate) struct PlanArgs {
    /// Shape of P, the engine that is read from: .toml or .json.
    #[arg(value_name = "P", required_unless_present = "example")]
    producer: Option<PathBuf>,
    /// Shape of D, the engine that reads: .toml or .json.
    #[arg(value_name = "D", required_unless_present = "example")]
    consumer: Option<PathBuf>,
    /// Tokens of the sample prompt.
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    tokens: u32,
    /// Print one JSON object as the last line of standard output, and the rest to standard error.
    #[arg(long)]
    json: bool,
    /// Write a pair of shape files, prefill.toml and decode.toml, into a folder (this one, if none is given) and end.
    #[arg(long, value_name = "FOLDER", num_args = 0..=1, default_missing_value = ".", conflicts_with_all = ["producer", "consumer", "json"])]
    example: Option<PathBuf>,
}

/// Compiles and prints.
pub(crate) fn run(args: &PlanArgs) -> Result<ExitCode, Failure> {
    if let Some(folder) = &args.example {
        example::write(folder)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (Some(producer), Some(consumer)) = (&args.producer, &args.consumer) else {
        return Err(Failure::new("plan", "two shape files are needed"));
    };
    let engine = |path: &PathBuf| Shape::read(path)?.engine(&path.display().to_string());
    let (p, d) = (engine(producer)?, engine(consumer)?);
    let (text, object, code) = match sketch::sketch(&p, &d, args.tokens)? {
        Ok(sketch) => {
            let covered = sketch.consumer.iter().all(|reader| reader.covered);
            let code = if covered { ExitCode::SUCCESS } else { ExitCode::FAILURE };
            (report::as_text(&sketch), json!(sketch), code)
        }
        Err(refused) => {
            let text = format!("refused   D{} cannot read from P: {}\n", refused.rank, refused.why);
            (text, json!({ "fits": false, "rank": refused.rank, "error": refused.why }), ExitCode::FAILURE)
        }
    };
    if args.json {
        eprint!("{text}");
        println!("{object}");
    } else {
        print!("{text}");
    }
    Ok(code)
}
