//! How a fault strikes: which requests are under way, and what is done to whom at which moment.

use std::time::Duration;

use rustix::process::Signal;

use super::args::FaultMode;
use super::client::{Seen, Wish};
use super::stage::Stage;
use super::{Asker, Failure};

/// Sees all wishes through while the fault strikes. What comes back is what was asked, in that order.
pub(super) async fn play(
    stage: &mut Stage,
    asker: &Asker,
    wishes: Vec<Wish>,
) -> Result<Vec<(Wish, Seen)>, Failure> {
    match stage.args().fault {
        FaultMode::KillPrefill
        | FaultMode::StopPrefill
        | FaultMode::RestartPrefill
        | FaultMode::KillDecode => in_three(stage, asker, wishes).await,
        FaultMode::Mixed => mixed(stage, asker, &wishes).await,
        FaultMode::HandshakeRefused | FaultMode::HandshakeHang | FaultMode::HandshakeGarbage => {
            let port = stage.proxy_port();
            // Every third is led astray; those beside it must not notice.
            let astray = |(number, wish): (usize, Wish)| Wish {
                handshake_port: port.filter(|_| number % 3 == 2),
                ..wish
            };
            Ok(asker.all(wishes.into_iter().enumerate().map(astray).collect(), "hand-over").await)
        }
        // These are in D's transports.
        FaultMode::None
        | FaultMode::DropConnection
        | FaultMode::Stall
        | FaultMode::Corrupt
        | FaultMode::Lapse => Ok(asker.all(wishes, "hand-over").await),
    }
}

/// Some requests before the fault, some that it strikes, and the rest after it.
async fn in_three(
    stage: &mut Stage,
    asker: &Asker,
    mut wishes: Vec<Wish>,
) -> Result<Vec<(Wish, Seen)>, Failure> {
    let struck = asker.concurrency.min(wishes.len());
    let before = wishes.len().saturating_sub(struck) / 3;
    let mut after = wishes.split_off(before);
    let rest = after.split_off(struck);
    let mut seen = asker.all(wishes, "before").await;
    let fault = stage.args().fault;
    let (during, done) = if fault == FaultMode::KillDecode {
        let strike = async {
            stage.d_is_busy().await;
            stage.restart_decode().await
        };
        tokio::join!(asker.all(after, "struck"), strike)
    } else {
        stage.gate(true).await;
        let count = after.len();
        let strike = async {
            stage.at_the_gate(count).await;
            let done = match fault {
                FaultMode::KillPrefill => stage.kill_prefill().await,
                FaultMode::RestartPrefill => stage.restart_prefill().await,
                _ => {
                    stage.signal_prefill(Signal::STOP);
                    Ok(())
                }
            };
            stage.gate(false).await;
            done
        };
        tokio::join!(asker.all(after, "struck"), strike)
    };
    done?;
    if fault == FaultMode::StopPrefill {
        stage.signal_prefill(Signal::CONT);
    }
    seen.extend(during);
    seen.extend(asker.all(rest, "after").await);
    Ok(seen)
}

/// A sequence of numbers from a seed, the same everywhere.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// Round after round: some requests, and at a random moment something happens to P or to D, while D's transports
/// cut, truncate and stall as they like.
async fn mixed(stage: &mut Stage, asker: &Asker, wishes: &[Wish]) -> Result<Vec<(Wish, Seen)>, Failure> {
    let mut dice = Dice(stage.args().seed);
    let mut seen = Vec::new();
    let mut next = wishes.iter().cycle();
    for round in 0..stage.args().rounds {
        let batch = next
            .by_ref()
            .take(asker.concurrency)
            .map(|wish| Wish { id: format!("{}-round-{round}", wish.id), ..wish.clone() })
            .collect();
        let moment = Duration::from_millis(dice.below(120));
        let (kind, span) = (dice.below(4), Duration::from_millis(100 + dice.below(2_500)));
        let strike = async {
            // The fault itself: a moment drawn from the seed, not a wait for anything.
            tokio::time::sleep(moment).await;
            match kind {
                0 => stage.restart_prefill().await,
                1 => stage.restart_decode().await,
                2 => {
                    stage.signal_prefill(Signal::STOP);
                    tokio::time::sleep(span).await;
                    stage.signal_prefill(Signal::CONT);
                    Ok(())
                }
                // This round is the transports' alone.
                _ => Ok(()),
            }
        };
        let (answers, done) = tokio::join!(asker.all(batch, "mixed"), strike);
        done?;
        seen.extend(answers);
    }
    Ok(seen)
}
