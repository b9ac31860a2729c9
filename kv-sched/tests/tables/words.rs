//! Reads what `{:?}` writes: the names of a machine's states are the machine's own, and a state that is renamed or
//! added shows in the tables without anybody's doing.

/// Splits where `separator` stands outside of all brackets and quotes, into `most` parts at most.
fn split<'a>(text: &'a str, separator: &str, most: usize) -> Vec<&'a str> {
    let (mut parts, mut start, mut depth, mut quoted, mut escaped) = (Vec::new(), 0, 0_i32, false, false);
    for (i, c) in text.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            _ if quoted => {}
            '{' | '[' | '(' => depth += 1,
            '}' | ']' | ')' => depth -= 1,
            _ if depth == 0 && i >= start && parts.len() + 1 < most && text[i..].starts_with(separator) => {
                parts.push(text[start..i].trim());
                start = i + separator.len();
            }
            _ => {}
        }
    }
    parts.push(text[start..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

/// What stands between the outermost brackets.
fn inside(text: &str) -> &str {
    let (Some(from), Some(to)) = (text.find(['{', '[', '(']), text.rfind(['}', ']', ')'])) else { return "" };
    text[from + 1..to].trim()
}

/// The fields of a structure or the entries of a map; of a set or list, its members with empty values.
pub(crate) fn entries(text: &str) -> Vec<(&str, &str)> {
    let entry = |part| match split(part, ": ", 2)[..] {
        [key, value] => (key, value),
        _ => (part, ""),
    };
    split(inside(text), ",", usize::MAX).into_iter().map(entry).collect()
}

/// The field under a path of names.
pub(crate) fn field<'a>(text: &'a str, path: &[&str]) -> &'a str {
    path.iter().fold(text, |text, name| {
        let found = entries(text).into_iter().find(|(key, _)| key == name);
        found.unwrap_or_else(|| panic!("no field {name} in {text}")).1
    })
}

/// The name of a variant, without its data.
pub(crate) fn variant(text: &str) -> &str {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default()
}

/// All numbers of a structure of counters, with their names; those of a map as `name.key`.
pub(crate) fn numbers(counters: &str) -> Vec<(String, u64)> {
    let of = |(name, value): (&str, &str)| match value.parse() {
        Ok(number) => vec![(name.to_owned(), number)],
        Err(_) => numbers(value).into_iter().map(|(key, n)| (format!("{name}.{key}"), n)).collect(),
    };
    entries(counters).into_iter().flat_map(of).collect()
}
