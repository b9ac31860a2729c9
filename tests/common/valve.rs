//! A pipe between a producer's worker and whoever reads from it, which a test can shut in the middle of a read.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

#[derive(Default)]
struct State {
    /// Bytes that may still pass towards the reader; `None`: all.
    budget: Option<usize>,
    /// Whether some bytes wait for the valve.
    stuck: bool,
    cut: bool,
    streams: Vec<TcpStream>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    over: AtomicBool,
}

/// Stands at the same port as the worker, on another address of the loopback.
pub struct Valve {
    shared: Arc<Shared>,
    port: u16,
}

const HOST: &str = "127.0.0.2";

impl Valve {
    pub fn open(port: u16) -> Self {
        let listener = TcpListener::bind((HOST, port)).unwrap();
        let shared = Arc::new(Shared::default());
        let ours = shared.clone();
        std::thread::spawn(move || {
            for reader in listener.incoming() {
                if ours.over.load(Ordering::SeqCst) {
                    return;
                }
                let (Ok(reader), Ok(worker)) = (reader, TcpStream::connect(("127.0.0.1", port))) else {
                    continue;
                };
                let mut state = ours.state.lock().unwrap();
                if state.cut {
                    continue;
                }
                state.streams.extend([reader.try_clone().unwrap(), worker.try_clone().unwrap()]);
                drop(state);
                let (shared, from, to) =
                    (ours.clone(), worker.try_clone().unwrap(), reader.try_clone().unwrap());
                std::thread::spawn(move || shared.down(from, to));
                std::thread::spawn(move || up(reader, worker));
            }
        });
        Self { shared, port }
    }

    /// So many bytes still pass towards the reader, then none.
    pub fn allow(&self, bytes: usize) {
        self.change(|state| state.budget = Some(bytes));
    }

    pub fn allow_all(&self) {
        self.change(|state| {
            state.budget = None;
            state.stuck = false;
        });
    }

    /// Whether bytes towards the reader wait for the valve.
    pub fn is_stuck(&self) -> bool {
        self.shared.state.lock().unwrap().stuck
    }

    /// Every connection through it ends, as if a process at one end had died.
    pub fn cut(&self) {
        self.change(|state| {
            state.cut = true;
            for stream in state.streams.drain(..) {
                // It may be closed already.
                let _ = stream.shutdown(Shutdown::Both);
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.shared.state.lock().unwrap());
        self.shared.changed.notify_all();
    }
}

impl Drop for Valve {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        self.cut();
        // Wakes the listener, which then closes its port.
        let _ = TcpStream::connect((HOST, self.port));
    }
}

impl Shared {
    /// From the worker to the reader, as far as the budget goes.
    fn down(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut bytes = vec![0; 64 << 10];
        while let Ok(n @ 1..) = from.read(&mut bytes) {
            let mut sent = 0;
            while sent < n {
                let mut state = self.state.lock().unwrap();
                while state.budget == Some(0) && !state.cut {
                    state.stuck = true;
                    state = self.changed.wait(state).unwrap();
                }
                if state.cut {
                    return;
                }
                let now = (n - sent).min(state.budget.unwrap_or(usize::MAX));
                state.budget = state.budget.map(|budget| budget - now);
                drop(state);
                if to.write_all(&bytes[sent..sent + now]).is_err() {
                    return;
                }
                sent += now;
            }
        }
        // The other end may be closed already.
        let _ = to.shutdown(Shutdown::Both);
    }
}

fn up(mut from: TcpStream, mut to: TcpStream) {
    // It ends with either of the two.
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Write);
}
