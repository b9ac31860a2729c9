//! The example of a transport of one's own passes the suite.

use std::process::ExitCode;
use std::sync::Arc;

use kv_testkit::conformance::{self, Harness, HarnessError};
use kv_transport::Transport;

#[path = "../examples/custom_transport/transport.rs"]
mod transport;

struct Mine;

impl Harness for Mine {
    fn name(&self) -> &'static str {
        "inproc"
    }

    fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError> {
        Ok(Arc::new(transport::Inproc::new()?))
    }
}

fn main() -> ExitCode {
    conformance::main(&Mine)
}
