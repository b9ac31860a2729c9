#![doc = include_str!("../README.md")]

pub mod engine;
pub mod sim;
pub mod unmoved;
