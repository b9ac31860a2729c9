//! The probe of CUDA and what follows from it, each tried in a process of its own with a driver that is made for it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)] // A failed step is a failed test.

use std::process::Command;

use kv_testkit::conformance::Unavailable;
use kv_testkit::conformance::cuda::FakeDriver;
use kv_transport::cuda::{CudaDevice, DeviceUnavailable};
use kv_transport::device::{CopyRange, Direction};
use kv_transport::{Device, DeviceError, Memory, MemoryError};

const ROLE: &str = "KV_CUDA_TEST";

/// Runs `child` in a process with a fake driver; `None` if none can be built, which is said.
fn run(role: &str, old: bool, how: &str) -> Option<String> {
    let fake = match FakeDriver::build(old) {
        Ok(fake) => fake,
        Err(Unavailable::Cannot(why)) => {
            eprintln!("skipped: {why}");
            return None;
        }
        Err(Unavailable::Failed(error)) => panic!("{error}"),
    };
    let command = fake.command(std::env::current_exe().unwrap());
    Some(said(command, role, how))
}

fn said(mut command: Command, role: &str, how: &str) -> String {
    command.args(["--exact", "child", "--nocapture", "--test-threads", "1"]).env(ROLE, role);
    command.env("FAKE_CUDA", how);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text.split_once("said: ").unwrap().1.lines().next().unwrap().to_owned()
}

/// What the others run; alone it does nothing.
#[test]
fn child() {
    match std::env::var(ROLE).as_deref() {
        Ok("probe") => match (CudaDevice::probe(), CudaDevice::open(0)) {
            (Ok(driver), Ok(device)) => {
                let none = CudaDevice::open(1).unwrap_err();
                assert_eq!(none, DeviceUnavailable::NoDevice { ordinal: 1, count: 1 });
                println!("said: {} {:?} {}", driver.version, driver.devices, device.id());
            }
            (Err(error), Err(same)) => {
                assert_eq!(error, same);
                println!("said: {error}");
            }
            other => panic!("{other:?}"),
        },
        Ok("damage") => {
            let device = CudaDevice::open(0).unwrap();
            let memory = device.allocate(1000).unwrap();
            let mut bytes = [1; 1000];
            memory.read(0, &mut bytes).unwrap();
            assert_eq!(bytes, [0; 1000]);
            memory.write(1, &[7; 9]).unwrap();
            memory.read(0, &mut bytes).unwrap();
            assert_eq!(bytes[..12], [0, 7, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0]);
            assert!(matches!(memory.base(), Err(MemoryError::OnDevice { .. })));
            // Copies so far: the zeroing, two reads, a write.
            for _ in 0..2 {
                let lost = memory.read(0, &mut bytes).unwrap_err();
                assert!(matches!(lost, MemoryError::Device(DeviceError::Lost { .. })), "{lost}");
                println!("said: {lost}");
            }
            assert!(device.allocate(10).is_err());
        }
        Ok("outside") => {
            let device = CudaDevice::open(0).unwrap();
            let memory = device.allocate(100).unwrap();
            // SAFETY: wrong on purpose; the fake driver checks.
            #[allow(unsafe_code)]
            let wide =
                unsafe { device.memory(memory.place().address, 101, std::sync::Arc::new(memory.clone())) };
            println!("said: {}", wide.unwrap().write(0, &[1; 101]).unwrap_err());
            memory.write(0, &[1; 100]).unwrap();
        }
        Ok("goes on") => {
            let device = CudaDevice::open(0).unwrap();
            let memory = device.allocate(1000).unwrap();
            let (mut bytes, mut back) = ([0; 1000], [0; 1000]);
            for turn in 1..20 {
                bytes.fill(turn);
                memory.write(0, &bytes).unwrap();
                memory.read(0, &mut back).unwrap();
                assert_eq!(back, bytes);
            }
            println!("said: fine");
        }
        Ok("partly") => {
            let device = CudaDevice::open(0).unwrap();
            let (memory, host) = (device.allocate(100).unwrap(), Memory::allocate(100).unwrap());
            host.write(0, &[7; 100]).unwrap();
            let at = |device| CopyRange { device, host: host.base().unwrap(), len: 100 };
            let ranges = [at(memory.place().address), at(memory.place().address + 1)];
            // SAFETY: both memories live longer than the copy; what is wrong about one on purpose, the fake driver sees.
            #[allow(unsafe_code)]
            let mut copying = unsafe { device.copy(Direction::ToDevice, &ranges) }.unwrap();
            // The first range is under way, so the caller must not free anything yet.
            assert_eq!(copying.poll(), Ok(false));
            println!("said: {}", copying.wait(std::time::Duration::from_secs(20)).unwrap_err());
            let mut back = [0; 100];
            memory.read(0, &mut back).unwrap();
            assert_eq!(back, [7; 100]);
        }
        _ => {}
    }
}

#[test]
fn t3_a_question_that_fails_is_no_end_of_a_copy() {
    for after in ["0", "1", "5", "6"] {
        if let Some(said) = run("goes on", false, &format!("odd={after}")) {
            assert_eq!(said, "fine");
        }
    }
}

#[test]
fn copies_go_on_while_an_engine_captures_a_graph() {
    if let Some(said) = run("goes on", false, "capturing") {
        assert_eq!(said, "fine");
    }
}

#[test]
fn t3_a_copy_of_which_a_part_is_refused_ends_when_the_rest_has() {
    if let Some(said) = run("partly", false, "") {
        assert_eq!(said, "device cuda:0: cuMemcpyAsync failed: invalid argument (code 1)");
    }
}

#[test]
fn a_machine_without_a_driver_is_told_so() {
    if CudaDevice::probe() != Err(DeviceUnavailable::NoDriver) {
        eprintln!("skipped: there is a CUDA driver on this machine");
        return;
    }
    let command = Command::new(std::env::current_exe().unwrap());
    assert_eq!(said(command, "probe", ""), "no CUDA driver: libcuda.so was not found");
}

#[test]
fn a_driver_without_a_device_is_told_so() {
    if let Some(said) = run("probe", false, "nodevice") {
        assert_eq!(said, "cuInit failed: no CUDA-capable device is detected (code 100)");
    }
}

#[test]
fn a_driver_that_lacks_a_function_is_told_so() {
    if let Some(said) = run("probe", true, "") {
        assert_eq!(said, "the CUDA driver has no function cuEventQuery");
    }
}

#[test]
fn a_driver_with_a_device_is_used() {
    if let Some(said) = run("probe", false, "") {
        assert_eq!(said, "12080 [\"Fake GPU\"] cuda:0");
    }
}

#[test]
fn a_damaged_context_is_a_lost_device() {
    if let Some(said) = run("damage", false, "damage=4") {
        let text = "device cuda:0 is lost: cuEventQuery: an illegal memory access was encountered (code 700)";
        assert_eq!(said, text);
    }
}

#[test]
fn copies_that_the_driver_refuses_are_errors() {
    if let Some(said) = run("outside", false, "") {
        assert_eq!(said, "device cuda:0: cuMemcpyAsync failed: invalid argument (code 1)");
    }
}
