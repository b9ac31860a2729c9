#![doc = include_str!("../README.md")]

mod answer;
mod dialler;
mod endpoint;
mod frames;
mod listener;

pub use answer::answer;
pub use dialler::{Contact, Dial, DialError, Dialler, RESOLVERS_MAX};
pub use listener::{ListenError, Listener, ListenerConfig, ListenerStats};
