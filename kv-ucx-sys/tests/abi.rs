//! The declarations against the headers that are installed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A failed step is a failed test.
#![cfg(target_os = "linux")]

use std::fmt::Write as _;
use std::io::Write as _;
use std::mem::{offset_of, size_of};
use std::path::PathBuf;
use std::process::Command;

use kv_ucx_sys::abi::*;

/// A struct: C's name, our size without what only later versions have, and each field with offset and size.
struct Layout {
    c: &'static str,
    size: usize,
    fields: Vec<(&'static str, usize, usize)>,
}

fn size_of_field<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! layout {
    ($c:literal, $rust:ident $(until $later:ident)?, $($field:ident),+ $(; $c_field:literal is $inner:ident)*) => {{
        let whole = [$(offset_of!($rust, $later),)? size_of::<$rust>()][0];
        Layout {
            c: $c,
            size: whole,
            fields: vec![
                $((stringify!($field), offset_of!($rust, $field), size_of_field::<$rust, _>(|s| &s.$field)),)+
                $(($c_field, offset_of!($rust, $inner), size_of_field::<$rust, _>(|s| &s.$inner)),)*
            ],
        }
    }};
}

fn layouts() -> Vec<Layout> {
    vec![
        layout!(
            "ucp_params_t",
            Params,
            field_mask,
            features,
            request_size,
            request_init,
            request_cleanup,
            tag_sender_mask,
            mt_workers_shared,
            estimated_num_eps,
            estimated_num_ppn,
            name
        ),
        layout!(
            "ucp_worker_params_t",
            WorkerParams,
            field_mask,
            thread_mode,
            cpu_mask,
            events,
            user_data,
            event_fd,
            flags,
            name,
            am_alignment,
            client_id
        ),
        layout!("ucp_err_handler_t", ErrHandler, cb, arg),
        layout!("ucs_sock_addr_t", SockAddr, addr, addrlen),
        layout!(
            "ucp_ep_params_t",
            EpParams,
            field_mask,
            address,
            err_mode,
            err_handler,
            user_data,
            flags,
            sockaddr,
            conn_request,
            name,
            local_sockaddr
        ),
        layout!(
            "ucp_mem_map_params_t", MemMapParams until later, field_mask, address, length, flags, prot, memory_type
        ),
        layout!(
            "ucp_request_param_t", RequestParam until later, op_attr_mask, flags, request, datatype, user_data,
            reply_buffer, memory_type, recv_info, memh; "cb.send" is cb
        ),
        layout!("ucp_am_handler_param_t", AmHandlerParam, field_mask, id, flags, cb, arg),
        layout!("ucp_am_recv_param_t", AmRecvParam, recv_attr, reply_ep),
    ]
}

/// Says past the harness that nothing was compared.
fn skip(why: &str) {
    std::io::stderr().write_all(format!("SKIPPED, nothing compared: {why}\n").as_bytes()).unwrap();
}

/// A program that prints what C thinks.
fn program(layouts: &[Layout]) -> String {
    let mut text = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <ucp/api/ucp.h>\n\
         #define F(s, f) printf(\"%s.%s %zu %zu\\n\", #s, #f, offsetof(s, f), sizeof(((s *)0)->f))\n\
         #define C(c) printf(\"%s %lld\\n\", #c, (long long)(c))\n\
         int main(void) {\n",
    );
    for layout in layouts {
        writeln!(text, "printf(\"{0} %zu\\n\", sizeof({0}));", layout.c).unwrap();
        for (field, ..) in &layout.fields {
            writeln!(text, "F({}, {field});", layout.c).unwrap();
        }
    }
    for (name, _) in CONSTANTS {
        writeln!(text, "C({name});").unwrap();
    }
    text.push_str("printf(\"ucs_status_t %zu\\n\", sizeof(ucs_status_t));\n");
    text.push_str("printf(\"version %d %d\\n\", UCP_API_MAJOR, UCP_API_MINOR);\nreturn 0; }\n");
    text
}

#[test]
fn structs_and_constants_are_those_of_the_headers() {
    let include = std::env::var_os("KV_UCX_INCLUDE").map(PathBuf::from);
    let header = include.clone().unwrap_or_else(|| "/usr/include".into()).join("ucp/api/ucp.h");
    if !header.exists() {
        return skip(&format!("there is no {}", header.display()));
    }
    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("layout.c"), folder.path().join("layout"));
    let layouts = layouts();
    std::fs::write(&source, program(&layouts)).unwrap();
    let mut compiler = Command::new("cc");
    if let Some(include) = &include {
        compiler.arg("-I").arg(include);
    }
    let Ok(compiled) = compiler.arg(&source).arg("-o").arg(&binary).output() else {
        return skip("there is no C compiler");
    };
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let printed = Command::new(&binary).output().unwrap();
    let printed = String::from_utf8(printed.stdout).unwrap();
    let find = |name: &str| {
        let found = printed.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        found.unwrap_or_else(|| panic!("{name} was not printed")).to_owned()
    };

    let oldest = find("version") == "1 13";
    let mut compared = 0;
    for layout in &layouts {
        let size: usize = find(layout.c).parse().unwrap();
        // Later versions may have grown, at the end.
        assert!(size == layout.size || (size > layout.size && !oldest), "{}: {size}", layout.c);
        for (field, offset, size) in &layout.fields {
            assert_eq!(
                find(&format!("{}.{field}", layout.c)),
                format!("{offset} {size}"),
                "{}.{field}",
                layout.c
            );
            compared += 1;
        }
    }
    for (name, value) in CONSTANTS {
        assert_eq!(find(name), value.to_string(), "{name}");
        compared += 1;
    }
    assert_eq!(find("ucs_status_t"), size_of::<Status>().to_string());
    assert!(compared > 80, "only {compared} were compared");
}

#[test]
fn what_a_call_returns_is_read_as_c_does() {
    assert_eq!(Posted::read(std::ptr::null_mut()), Posted::Done);
    for status in [-1i8, -16, -80, -100] {
        let returned = isize::from(status) as *mut core::ffi::c_void;
        assert_eq!(Posted::read(returned), Posted::Failed(status));
    }
    let request = (-101isize) as *mut core::ffi::c_void;
    assert_eq!(Posted::read(request), Posted::Pending(request));
    let request = 4096isize as *mut core::ffi::c_void;
    assert_eq!(Posted::read(request), Posted::Pending(request));
}
