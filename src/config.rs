//! The one configuration that both halves are built from.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_proto::{EngineId, IdError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What every environment variable of ours begins with.
pub const ENV_PREFIX: &str = "KV_CONNECTOR_";

/// Everything a deployer can set, with defaults that work on one host.
///
/// As JSON every field is optional, and an unknown field is an error. As environment variables the names are
/// upper case with `KV_CONNECTOR_` in front: `lease_ttl_ms` is `KV_CONNECTOR_LEASE_TTL_MS`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Name of this engine, the same over all its ranks. Empty: a random one is drawn at start.
    pub engine_id: String,
    /// Address at which the handshake listener listens.
    pub handshake_host: String,
    /// Port of the handshake listener; 0 lets the system choose. One listener per engine.
    pub handshake_port: u16,
    /// Host that consumers are told to shake hands with. Empty: `handshake_host`. Needed when that is a wildcard.
    pub advertise_host: String,
    /// The transport that moves bytes. `tcp` works everywhere; `shm` only between processes of one user on one host; `ucx` wants
    /// libucp 1.13 or newer on the machine; `auto` uses, for each peer, the best of these that both sides have, and says
    /// which one and why (`ucx` only where there is a device for remote direct memory access).
    pub transport: String,
    /// Address at which a worker's transport listens; the port is the system's choice.
    pub transport_host: String,
    /// Host that peers are told to connect to. Empty: `transport_host`. Needed when that is a wildcard.
    pub transport_advertise_host: String,
    /// Connections of `tcp` to each peer, up to 8, over which large reads are spread; each has its thread on either side. 0: one for each
    /// processor, 4 at most.
    pub transport_connections: u32,
    /// Life of a lease without renewal.
    pub lease_ttl_ms: u64,
    /// What a renewal extends a lease to, counted from its arrival.
    pub lease_renewal_ms: u64,
    /// Longest life of a lease, however often it is renewed.
    pub lease_max_ms: u64,
    /// What is left of a lease's life when its consumer's last connection is lost: the consumer's time to come back.
    pub lease_grace_ms: u64,
    /// Time between two renewals that a consumer sends to one producer.
    pub renew_every_ms: u64,
    /// Fewer remote tokens than this are computed instead of loaded.
    pub min_remote_tokens: u32,
    /// How long a request may wait for room with its lease kept alive.
    pub queue_limit_ms: u64,
    /// How long a load may take over all, as the scheduler half sees it.
    pub load_limit_ms: u64,
    /// How long workers may take, beyond their own limits, to report what they must report.
    pub report_grace_ms: u64,
    /// A handshake, from looking up the host to the whole answer.
    pub handshake_limit_ms: u64,
    /// A connection to a producer's worker, greeting included.
    pub connect_limit_ms: u64,
    /// A load's wait for its peer to be ready.
    pub peer_wait_ms: u64,
    /// A read, from its begin to the last byte.
    pub read_limit_ms: u64,
    /// A read without a single byte arriving.
    pub stall_limit_ms: u64,
    /// A load is read in portions of about so many bytes. What was read is checked while the next portion is under way,
    /// so that a failure costs only what came after.
    pub portion_bytes: u64,
    /// How often a read that failed for a reason that may pass is tried again, from where it was.
    pub load_retries: u32,
    /// A producer's answer whether the lease held.
    pub confirm_limit_ms: u64,
    /// The wait before a peer that failed is tried again, doubled with each failure.
    pub retry_min_ms: u64,
    /// Longest such wait.
    pub retry_max_ms: u64,
    /// Whether a load counts as good only if the producer has found the digests of its blocks equal to its own: against
    /// accidents of memory and of whatever moves the bytes, not against attacks. It is the consumer's choice; every
    /// producer answers.
    pub checksums: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            engine_id: String::new(),
            handshake_host: "127.0.0.1".to_owned(),
            handshake_port: 0,
            advertise_host: String::new(),
            transport: "tcp".to_owned(),
            transport_host: "127.0.0.1".to_owned(),
            transport_advertise_host: String::new(),
            transport_connections: 0,
            // A consumer that lives renews every two seconds, so five renewals must be lost before a lease ends.
            lease_ttl_ms: 10_000,
            lease_renewal_ms: 10_000,
            lease_max_ms: 600_000,
            // A dead consumer's connections are lost at once; one that lives is back within a second.
            lease_grace_ms: 3_000,
            renew_every_ms: 2_000,
            min_remote_tokens: 1,
            queue_limit_ms: 300_000,
            load_limit_ms: 40_000,
            report_grace_ms: 10_000,
            handshake_limit_ms: 5_000,
            connect_limit_ms: 3_000,
            peer_wait_ms: 10_000,
            read_limit_ms: 10_000,
            stall_limit_ms: 3_000,
            portion_bytes: 64 << 20,
            load_retries: 0,
            confirm_limit_ms: 3_000,
            retry_min_ms: 500,
            retry_max_ms: 30_000,
            checksums: false,
        }
    }
}

/// Why a configuration was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Not JSON, an unknown field, or a value of another type.
    #[error("configuration, field {field}: {reason}")]
    Field {
        /// The field, or `(whole)`.
        field: String,
        /// The decoder's words.
        reason: String,
    },
    /// An environment variable of ours that names no field.
    #[error("environment variable {name} names no field; {prefix}* are {known:?}", prefix = ENV_PREFIX)]
    UnknownVariable {
        /// The variable.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// An environment variable whose value cannot be that of its field.
    #[error("environment variable {name} is {value:?}, which is not {expected}")]
    Variable {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// What it must be.
        expected: &'static str,
    },
    /// A number outside its range.
    #[error("{field} is {value}; {min} to {max} are allowed")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Smallest value allowed.
        min: u64,
        /// Largest value allowed.
        max: u64,
    },
    /// Two fields in the wrong order.
    #[error("{field} of {value} is more than {other} of {other_value}")]
    Order {
        /// The one that must not be more.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The other.
        other: &'static str,
        /// Its value.
        other_value: u64,
    },
    /// The engine id cannot be.
    #[error(transparent)]
    EngineId(#[from] IdError),
    /// A transport that this build does not have.
    #[error("transport is {name:?}; this build has {known:?}")]
    UnknownTransport {
        /// The name given.
        name: String,
        /// The names that there are.
        known: &'static [&'static str],
    },
    /// A wildcard address would be told to peers.
    #[error("{field} is the wildcard {value:?}, which no peer can dial; set {advertise}")]
    Wildcard {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// The field to set.
        advertise: &'static str,
    },
    /// A field that must not be empty is.
    #[error("{field} is empty")]
    Empty {
        /// The field.
        field: &'static str,
    },
}

/// Most connections of one peer.
const CONNECTIONS_MAX: u32 = 8;

/// Transports that can be chosen by name.
#[cfg(target_os = "linux")]
pub const TRANSPORTS: &[&str] = &["tcp", "shm", "ucx", "auto"];
/// Transports that can be chosen by name.
#[cfg(not(target_os = "linux"))]
pub const TRANSPORTS: &[&str] = &["tcp", "auto"];

/// Longest duration that a field may name: a day.
const DAY_MS: u64 = 86_400_000;

fn is_wildcard(host: &str) -> bool {
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    plain == "*" || plain.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_unspecified())
}

impl Config {
    /// Reads JSON; fields that are absent take their defaults.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let mut decoder = serde_json::Deserializer::from_str(text);
        let config: Self = serde_path_to_error::deserialize(&mut decoder).map_err(|e| {
            let path = e.path().to_string();
            ConfigError::Field {
                field: if path == "." { "(whole)".to_owned() } else { path },
                reason: e.into_inner().to_string(),
            }
        })?;
        decoder
            .end()
            .map_err(|e| ConfigError::Field { field: "(whole)".to_owned(), reason: e.to_string() })?;
        config.check()?;
        Ok(config)
    }

    /// Takes `KV_CONNECTOR_*` out of the process's environment, over the defaults.
    pub fn from_env() -> Result<Self, ConfigError> {
        let mut ours = Vec::new();
        for (name, value) in std::env::vars_os() {
            // Names and values of others need not be Unicode, and are none of our business.
            let Some(name) = name.to_str().filter(|name| name.starts_with(ENV_PREFIX)) else { continue };
            let Some(value) = value.to_str() else {
                let value = value.to_string_lossy().into_owned();
                return Err(ConfigError::Variable { name: name.to_owned(), value, expected: "Unicode" });
            };
            ours.push((name.to_owned(), value.to_owned()));
        }
        Self::from_variables(ours)
    }

    /// As [`Config::from_env`], from any list of variables; those without our prefix are passed over.
    pub fn from_variables(
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let whole =
            |e: serde_json::Error| ConfigError::Field { field: "(whole)".to_owned(), reason: e.to_string() };
        let mut fields: BTreeMap<String, serde_json::Value> =
            serde_json::from_value(serde_json::to_value(Self::default()).map_err(whole)?).map_err(whole)?;
        let names = || -> Vec<String> {
            fields.keys().map(|k| format!("{ENV_PREFIX}{}", k.to_ascii_uppercase())).collect()
        };
        let mut given = BTreeMap::new();
        for (name, value) in variables {
            let Some(field) = name.strip_prefix(ENV_PREFIX) else { continue };
            let field = field.to_ascii_lowercase();
            match fields.get(&field) {
                None => return Err(ConfigError::UnknownVariable { name, known: names() }),
                Some(serde_json::Value::Number(_)) => match value.trim().parse::<u64>() {
                    Ok(number) => drop(given.insert(field, number.into())),
                    Err(_) => {
                        return Err(ConfigError::Variable { name, value, expected: "a whole number" });
                    }
                },
                Some(serde_json::Value::Bool(_)) => match value.trim().parse::<bool>() {
                    Ok(yes) => drop(given.insert(field, yes.into())),
                    Err(_) => {
                        return Err(ConfigError::Variable { name, value, expected: "true or false" });
                    }
                },
                Some(_) => drop(given.insert(field, serde_json::Value::String(value))),
            }
        }
        fields.extend(given);
        let text = serde_json::to_string(&fields).map_err(whole)?;
        Self::from_json(&text)
    }

    /// Checks ranges, orders and names. Both `from_…` functions have done it; the connectors do it again for a
    /// configuration that was built by hand.
    pub fn check(&self) -> Result<(), ConfigError> {
        if !self.engine_id.is_empty() {
            EngineId::new(self.engine_id.as_str())?;
        }
        if !TRANSPORTS.contains(&self.transport.as_str()) {
            return Err(ConfigError::UnknownTransport { name: self.transport.clone(), known: TRANSPORTS });
        }
        self.check_hosts()?;
        if self.transport_connections > CONNECTIONS_MAX {
            let value = u64::from(self.transport_connections);
            let max = u64::from(CONNECTIONS_MAX);
            return Err(ConfigError::Range { field: "transport_connections", value, min: 0, max });
        }
        let durations = [
            ("lease_ttl_ms", self.lease_ttl_ms),
            ("lease_renewal_ms", self.lease_renewal_ms),
            ("lease_max_ms", self.lease_max_ms),
            ("lease_grace_ms", self.lease_grace_ms),
            ("renew_every_ms", self.renew_every_ms),
            ("queue_limit_ms", self.queue_limit_ms),
            ("load_limit_ms", self.load_limit_ms),
            ("report_grace_ms", self.report_grace_ms),
            ("handshake_limit_ms", self.handshake_limit_ms),
            ("connect_limit_ms", self.connect_limit_ms),
            ("peer_wait_ms", self.peer_wait_ms),
            ("read_limit_ms", self.read_limit_ms),
            ("stall_limit_ms", self.stall_limit_ms),
            ("confirm_limit_ms", self.confirm_limit_ms),
            ("retry_min_ms", self.retry_min_ms),
            ("retry_max_ms", self.retry_max_ms),
        ];
        for (field, value) in durations {
            if !(1..=DAY_MS).contains(&value) {
                return Err(ConfigError::Range { field, value, min: 1, max: DAY_MS });
            }
        }
        if self.portion_bytes == 0 {
            return Err(ConfigError::Range { field: "portion_bytes", value: 0, min: 1, max: u64::MAX });
        }
        let mut worker = self.peer_wait_ms + self.read_limit_ms + self.stall_limit_ms + self.confirm_limit_ms;
        let mut waits = "peer_wait_ms + read_limit_ms + stall_limit_ms + confirm_limit_ms";
        if self.checksums {
            // What was read is first compared, and then confirmed.
            worker += self.confirm_limit_ms;
            waits = "peer_wait_ms + read_limit_ms + stall_limit_ms + 2 x confirm_limit_ms, with checksums";
        }
        let orders = [
            ("lease_ttl_ms", self.lease_ttl_ms, "lease_max_ms", self.lease_max_ms),
            ("lease_renewal_ms", self.lease_renewal_ms, "lease_max_ms", self.lease_max_ms),
            ("retry_min_ms", self.retry_min_ms, "retry_max_ms", self.retry_max_ms),
            ("stall_limit_ms", self.stall_limit_ms, "read_limit_ms", self.read_limit_ms),
            // The workers' own limits must have had their turn before the scheduler half gives up on them.
            (waits, worker, "load_limit_ms", self.load_limit_ms),
        ];
        for (field, value, other, other_value) in orders {
            if value > other_value {
                return Err(ConfigError::Order { field, value, other, other_value });
            }
        }
        Ok(())
    }

    fn check_hosts(&self) -> Result<(), ConfigError> {
        let hosts = [
            ("handshake_host", &self.handshake_host, "advertise_host", &self.advertise_host),
            (
                "transport_host",
                &self.transport_host,
                "transport_advertise_host",
                &self.transport_advertise_host,
            ),
        ];
        for (field, host, advertise, advertised) in hosts {
            if host.is_empty() {
                return Err(ConfigError::Empty { field });
            }
            let told = if advertised.is_empty() { host } else { advertised };
            if is_wildcard(told) {
                let field = if advertised.is_empty() { field } else { advertise };
                return Err(ConfigError::Wildcard { field, value: told.clone(), advertise });
            }
        }
        Ok(())
    }

    /// The host that consumers are told.
    pub fn told_host(&self) -> &str {
        if self.advertise_host.is_empty() { &self.handshake_host } else { &self.advertise_host }
    }
}

/// Milliseconds of a field as a duration.
pub(crate) const fn ms(field: u64) -> Duration {
    Duration::from_millis(field)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(list: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_variables(list.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())))
    }

    #[test]
    fn nothing_given_is_the_default() {
        assert_eq!(Config::from_json("{}"), Ok(Config::default()));
        assert_eq!(vars(&[("HOME", "/x")]), Ok(Config::default()));
    }

    #[test]
    fn json_and_environment_set_the_same_fields() {
        let json = Config::from_json(r#"{"engine_id": "123", "lease_ttl_ms": 5000}"#).unwrap();
        let env = vars(&[("KV_CONNECTOR_ENGINE_ID", "123"), ("KV_CONNECTOR_LEASE_TTL_MS", "5000")]).unwrap();
        assert_eq!(json, env);
        assert_eq!(json.lease_ttl_ms, 5000);
    }

    #[test]
    fn errors_name_the_field_and_the_values() {
        let refuse = |json: &str| Config::from_json(json).unwrap_err().to_string();
        assert!(
            refuse(r#"{"lease_ttl": 1}"#).contains("unknown field `lease_ttl`, expected one of `engine_id`")
        );
        assert_eq!(
            refuse(r#"{"lease_ttl_ms": "5"}"#),
            "configuration, field lease_ttl_ms: invalid type: string \"5\", expected u64 at line 1 column 20"
        );
        assert_eq!(refuse(r#"{"stall_limit_ms": 0}"#), "stall_limit_ms is 0; 1 to 86400000 are allowed");
        assert_eq!(
            refuse(r#"{"lease_ttl_ms": 700000}"#),
            "lease_ttl_ms of 700000 is more than lease_max_ms of 600000"
        );
        assert_eq!(
            refuse(r#"{"transport_connections": 9}"#),
            "transport_connections is 9; 0 to 8 are allowed"
        );
        assert_eq!(
            refuse(r#"{"transport": "rdma"}"#),
            "transport is \"rdma\"; this build has [\"tcp\", \"shm\", \"ucx\", \"auto\"]"
        );
        assert_eq!(
            refuse(r#"{"handshake_host": "0.0.0.0"}"#),
            "handshake_host is the wildcard \"0.0.0.0\", which no peer can dial; set advertise_host"
        );
        assert!(refuse(r#"{"handshake_port": 70000}"#).contains("field handshake_port"));
        assert!(refuse("{} {}").contains("trailing characters"));
        let long = "x".repeat(300);
        assert!(refuse(&format!(r#"{{"engine_id": "{long}"}}"#)).contains("engine_id is 300 bytes long"));
    }

    #[test]
    fn environment_errors_name_the_variable() {
        let unknown = vars(&[("KV_CONNECTOR_LEASE", "1")]).unwrap_err().to_string();
        assert!(unknown.starts_with("environment variable KV_CONNECTOR_LEASE names no field"));
        assert!(unknown.contains("KV_CONNECTOR_LEASE_TTL_MS"));
        let wrong = vars(&[("KV_CONNECTOR_LEASE_TTL_MS", "soon")]).unwrap_err().to_string();
        assert_eq!(
            wrong,
            "environment variable KV_CONNECTOR_LEASE_TTL_MS is \"soon\", which is not a whole number"
        );
    }

    #[test]
    fn a_switch_is_true_or_false() {
        assert!(!Config::default().checksums);
        assert!(Config::from_json(r#"{"checksums": true}"#).unwrap().checksums);
        assert!(vars(&[("KV_CONNECTOR_CHECKSUMS", " true")]).unwrap().checksums);
        assert_eq!(
            vars(&[("KV_CONNECTOR_CHECKSUMS", "1")]).unwrap_err().to_string(),
            "environment variable KV_CONNECTOR_CHECKSUMS is \"1\", which is not true or false"
        );
    }

    #[test]
    fn checksums_need_time_for_two_answers() {
        let config = Config { load_limit_ms: 26_000, ..Config::default() };
        assert_eq!(config.check(), Ok(()));
        let error = Config { checksums: true, ..config }.check().unwrap_err().to_string();
        assert!(error.contains("2 x confirm_limit_ms, with checksums of 29000 is more"), "{error}");
    }

    #[test]
    fn a_wildcard_is_one_however_it_is_written() {
        for host in ["0.0.0.0", "::", "[::]", "::0", "0:0:0:0:0:0:0:0", "*"] {
            let config = Config { transport_host: host.into(), ..Config::default() };
            assert!(matches!(config.check(), Err(ConfigError::Wildcard { .. })), "{host}");
        }
    }

    #[test]
    fn a_wildcard_is_fine_when_something_else_is_told() {
        let config = Config {
            handshake_host: "0.0.0.0".into(),
            advertise_host: "p0.example".into(),
            ..Config::default()
        };
        assert_eq!(config.check(), Ok(()));
        assert_eq!(config.told_host(), "p0.example");
    }
}
