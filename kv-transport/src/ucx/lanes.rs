//! Which lanes an endpoint uses, from what UCX prints about it. UCX 1.13 has no other way to tell.

/// The lanes as `transport/device`, each once, in UCX's order.
pub(super) fn parse(info: &str) -> Vec<String> {
    let mut lanes: Vec<String> = vec![];
    for line in info.lines() {
        // "#    lane[0]:  2:posix/memory.0 md[2]  -> ..."
        let Some((_, rest)) = line.split_once("lane[") else { continue };
        let Some(word) = rest.split_whitespace().find(|word| word.contains('/')) else { continue };
        let name = word.split_once(':').map_or(word, |(_, name)| name);
        let name = name.rsplit_once('.').map_or(name, |(name, _)| name);
        if !lanes.iter().any(|lane| lane == name) {
            lanes.push(name.to_owned());
        }
    }
    lanes
}

/// Lanes on which UCX cannot reach into another process's memory by itself: it emulates a get by messages.
const EMULATED: [&str; 3] = ["tcp", "posix", "sysv"];

/// Whether every one of these lanes would emulate a get. Of none nothing is known.
pub(super) fn are_emulated(lanes: &[String]) -> bool {
    let emulated = |lane: &String| EMULATED.contains(&lane.split_once('/').map_or(&**lane, |(name, _)| name));
    !lanes.is_empty() && lanes.iter().all(emulated)
}

#[cfg(test)]
mod tests {
    #[test]
    fn lanes_are_found_in_what_ucx_prints() {
        let info = "# UCP endpoint\n#\n#   peer: <no debug data>\n\
            #   lane[0]:  4:posix/memory.0 md[3] -> md[3]/posix/sysdev[255] am am_bw#0\n\
            #   lane[1]:  1:tcp/eth0.0 md[1] -> md[1]/tcp rma_bw#1\n\
            #   lane[2]:  1:tcp/eth0.0 md[1] -> md[1]/tcp rma_bw#2\n";
        assert_eq!(super::parse(info), ["posix/memory", "tcp/eth0"]);
        assert!(super::are_emulated(&super::parse(info)));
        let word = |lane: &str| lane.to_owned();
        assert!(!super::are_emulated(&[word("tcp/eth0"), word("rc_mlx5/mlx5_0:1")]));
        assert!(!super::are_emulated(&[word("self/memory")]) && !super::are_emulated(&[]));
        assert!(super::parse("nothing of the kind\nlane[").is_empty());
    }
}
