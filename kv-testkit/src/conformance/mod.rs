//! The conformance suite of the transport contract: whoever writes a transport proves it with this.
//!
//! Implement [`Harness`], of which two methods are required, and make [`main`] the main function of a test with
//! `harness = false`:
//!
//! ```no_run
//! use std::process::ExitCode;
//! use std::sync::Arc;
//!
//! use kv_testkit::conformance::{self, ChildPeer, Harness, HarnessError, Remote, Unavailable};
//! use kv_transport::Transport;
//! use kv_transport::tcp::{TcpConfig, TcpTransport};
//!
//! struct Mine;
//!
//! impl Harness for Mine {
//!     fn name(&self) -> &'static str {
//!         "mine"
//!     }
//!
//!     fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError> {
//!         Ok(Arc::new(TcpTransport::bind(TcpConfig::default())?))
//!     }
//!
//!     fn remote(&self) -> Result<Box<dyn Remote>, Unavailable> {
//!         ChildPeer::start()
//!     }
//! }
//!
//! fn main() -> ExitCode {
//!     conformance::main(&Mine)
//! }
//! ```
//!
//! Every case is named after the rule that it is about, `t3_…` after T-3; the rules are written out in
//! [`kv_transport::rules`]. A case that does not apply, because of what the transport claims or what the harness
//! cannot do, is shown as ignored with its reason. One that hangs or panics fails alone. A run in which nothing was
//! tried fails.
//!
//! The cases that hunt for races repeat; `KV_CONFORMANCE_REPEATS=1000` is the long form.

mod bench;
mod case;
mod child;
#[cfg(target_os = "linux")]
pub mod cuda;
pub mod device;
mod harness;
mod run;
#[cfg(target_os = "linux")]
pub mod shm;
mod t01;
mod t02;
mod t03;
mod t04;
mod t05;
mod t06;
mod t07;
mod t08;
mod t09;
mod t10;
mod t11;
mod t12;
pub mod tcp;
#[cfg(target_os = "linux")]
pub mod ucx;

pub use case::{CaseReport, Rule, Verdict};
pub use child::{ChildPeer, serve_if_asked};
pub use harness::{Harness, HarnessError, Link, REMOTE_BYTES, Remote, Unavailable, remote_contents};
pub use run::{main, report};

fn all() -> Vec<case::Case> {
    let groups = [
        t01::CASES,
        t02::CASES,
        t03::CASES,
        t04::CASES,
        t05::CASES,
        t06::CASES,
        t07::CASES,
        t08::CASES,
        t09::CASES,
        t10::CASES,
        t11::CASES,
        t12::CASES,
    ];
    groups.concat()
}
