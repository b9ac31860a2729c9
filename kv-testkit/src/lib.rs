#![doc = include_str!("../README.md")]

pub mod conformance;
pub mod device;
pub mod engine;
pub mod explore;
pub mod faults;
pub mod passthrough;
pub mod sim;
pub mod unmoved;
