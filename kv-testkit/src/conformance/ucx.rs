//! The harness of the ucx transport, over lanes of one's choice.

use std::sync::Arc;
use std::time::Duration;

use kv_transport::ucx::{UcxConfig, UcxTransport};
use kv_transport::{Transport, TransportError};

use super::{ChildPeer, Harness, HarnessError, Remote, Unavailable};

/// Tries [`UcxTransport`]. Without libucp on this machine all is skipped, with what the loader says.
#[derive(Debug, Clone, Copy)]
pub struct UcxHarness {
    /// UCX's word for the lanes, such as `tcp,self`.
    pub lanes: &'static str,
}

impl UcxHarness {
    fn config(self) -> UcxConfig {
        UcxConfig {
            settings: vec![("TLS".to_owned(), self.lanes.to_owned())],
            keep_alive: Duration::from_millis(500),
            silence_limit: Duration::from_secs(3),
            ..UcxConfig::default()
        }
    }
}

impl Harness for UcxHarness {
    fn name(&self) -> &'static str {
        self.lanes
    }

    fn endpoint(&self) -> Result<Arc<dyn Transport>, HarnessError> {
        Ok(Arc::new(UcxTransport::open(self.config())?))
    }

    fn missing(&self) -> Option<String> {
        match UcxTransport::open(self.config()) {
            Err(error @ TransportError::Library { .. }) => Some(error.to_string()),
            // Any other failure is one of the transport's, which the cases then show.
            _ => None,
        }
    }

    fn remote(&self) -> Result<Box<dyn Remote>, Unavailable> {
        ChildPeer::start()
    }

    fn silence_limit(&self) -> Option<Duration> {
        Some(self.config().silence_limit)
    }
}
