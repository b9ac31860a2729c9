//! What engines say of their host pools.

use serde_json::{Value, json};

/// Figures that are shown of a host pool, by where the engine has them.
const SHOWN: [(&str, &str); 10] = [
    ("blocks", "/blocks"),
    ("held", "/held"),
    ("records", "/records"),
    ("saved", "/counters/saved"),
    ("restored", "/counters/restored"),
    ("no_room", "/counters/no_room"),
    ("failed", "/counters/failed"),
    ("late", "/counters/late"),
    ("bytes", "/counters/bytes"),
    ("ranges", "/counters/ranges"),
];

/// An engine's host pool, if it has one.
fn pool(engine: &Value) -> Option<&Value> {
    engine.get("staging").filter(|pool| !pool.is_null())
}

/// Blocks that a host pool holds, or requests that still have to do with it, whichever are more. Without one nothing is held.
pub(super) fn held(engine: &Value) -> u64 {
    let figure = |pool: &Value, name: &str| pool[name].as_u64().unwrap_or(u64::MAX);
    pool(engine).map_or(0, |pool| figure(pool, "held").max(figure(pool, "records")))
}

/// Figures of both host pools; null for an engine that has none.
pub(super) fn figures(producer: &Value, consumer: &Value) -> Value {
    let of = |engine: &Value| {
        let shown = |pool: &Value| {
            let one = |(name, at): &(&str, &str)| {
                ((*name).to_owned(), pool.pointer(at).cloned().unwrap_or(Value::Null))
            };
            Value::Object(SHOWN.iter().map(one).collect())
        };
        pool(engine).map_or(Value::Null, shown)
    };
    json!({ "producer": of(producer), "consumer": of(consumer) })
}

/// A line about them; empty if there is none.
pub(super) fn line(figures: &Value) -> String {
    let side = |(name, key): (&str, &str)| {
        let pool = figures.get(key).filter(|pool| !pool.is_null())?;
        let parts = ["saved", "restored", "no_room", "held"].map(|figure| {
            let word = if figure == "no_room" { "without room" } else { figure };
            format!("{} {word}", pool[figure])
        });
        Some(format!("{name}: {}", parts.join(", ")))
    };
    let sides: Vec<String> = [("P", "producer"), ("D", "consumer")].into_iter().filter_map(side).collect();
    if sides.is_empty() { String::new() } else { format!("staging   {}", sides.join("; ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_holds_something_or_does_not_tell_is_seen() {
        let pool = |held: u64, records: u64| json!({ "staging": { "held": held, "records": records } });
        assert_eq!((held(&pool(0, 0)), held(&pool(3, 1)), held(&pool(0, 2))), (0, 3, 2));
        assert_eq!((held(&json!({ "staging": null })), held(&json!({}))), (0, 0));
        assert_eq!(held(&json!({ "staging": {} })), u64::MAX);
        assert_eq!(line(&figures(&json!({}), &Value::Null)), "");
        let told = line(&figures(&pool(3, 1), &json!({})));
        assert_eq!(told, "staging   P: null saved, null restored, null without room, 3 held");
    }
}
