//! Plan files.

use kv_testkit::faults::{FailWith, Fault, FaultPlan, On, Rule, Which};

#[test]
fn toml_json_and_the_builder_make_the_same_plan() {
    let toml = FaultPlan::parse(
        r#"
        seed = 7

        [[rules]]
        on = "read"
        fault = "truncate"
        pattern = "XOOXO"
        arrive_percent = 30
        error = "timed_out"

        [[rules]]
        on = "send"
        message = "read_done"
        fault = "drop"
        probability = 0.25
        limit = 3

        [[rules]]
        on = "read"
        fault = "late_write"
        at = [2, 9]
        delay_ms = 5
        "#,
    )
    .unwrap();
    let built = FaultPlan::seeded(7)
        .rule(
            Rule::new(On::Read, Fault::Truncate { arrive_percent: 30, error: FailWith::TimedOut })
                .which(Which::Pattern("XOOXO".parse().unwrap())),
        )
        .and_then(|plan| {
            let rule = Rule::new(On::Send, Fault::Drop).message("read_done");
            plan.rule(rule.which(Which::Probability(0.25)).limit(3))
        })
        .and_then(|plan| {
            plan.rule(Rule::new(On::Read, Fault::LateWrite { delay_ms: 5 }).which(Which::At(vec![2, 9])))
        })
        .unwrap();
    assert_eq!(toml, built);
    assert_eq!(FaultPlan::parse(&built.to_json()).unwrap(), built);
    assert_eq!(FaultPlan::parse("").unwrap(), FaultPlan::default());
}

#[test]
fn bad_plans_are_refused_by_field_and_value() {
    for (rule, words) in [
        ("on = 'read'", "rules[0].fault is missing"),
        ("fault = 'fail'", "rules[0].on is missing"),
        ("on = 'write'\nfault = 'fail'", "rules[0].on: unknown variant `write`, expected one of `read`"),
        ("on = 'read'\nfault = 'burn'", "rules[0].fault is \"burn\"; known are fail, delay"),
        ("on = 'read'\nfault = 'drop'", "rules[0].fault is \"drop\"; operations of kind read cannot"),
        ("on = 'connect'\nfault = 'truncate'", "operations of kind connect cannot"),
        ("on = 'read'\nfault = 'delay'", "rules[0].delay_ms is missing"),
        ("on = 'read'\nfault = 'delay'\ndelay_ms = -4", "rules[0].delay_ms: invalid value: integer `-4`"),
        ("on = 'read'\nfault = 'stall'\ndelay_ms = 4", "rules[0].delay_ms means nothing for the fault stall"),
        ("on = 'send'\nfault = 'fail'\nerror = 'stalled'", "rules[0].error means nothing for the fault fail"),
        ("on = 'read'\nfault = 'fail'\nprobability = 1.5", "rules[0].probability is 1.5; more than 0"),
        ("on = 'read'\nfault = 'fail'\nprobability = 0", "rules[0].probability is 0; more than 0"),
        ("on = 'read'\nfault = 'fail'\nprobability = nan", "rules[0].probability is NaN"),
        ("on = 'read'\nfault = 'fail'\npattern = 'XYZ'", "rules[0].pattern is \"XYZ\"; it is made of X"),
        ("on = 'read'\nfault = 'fail'\nat = [3, 0]", "rules[0].at is [3, 0]; it is a list of positions"),
        ("on = 'read'\nfault = 'fail'\nat = [3]\npattern = 'X'", "rules[0].at is given; not beside pattern"),
        ("on = 'read'\nfault = 'fail'\nlimit = 0", "rules[0].limit is 0; at least 1"),
        ("on = 'read'\nfault = 'corrupt'\nbytes = 0", "rules[0].bytes is 0; at least 1"),
        ("on = 'read'\nfault = 'truncate'\narrive_percent = 100", "rules[0].arrive_percent is 100; 0 to 99"),
        ("on = 'read'\nfault = 'fail'\nmessage = 'renew'", "rules[0].message is \"renew\"; only with"),
        ("on = 'send'\nfault = 'drop'\nmessage = 'ping'", "rules[0].message is \"ping\"; known are hello"),
        ("on = 'read'\nfault = 'fail'\nwhen = 3", "rules[0].when: unknown field `when`"),
    ] {
        let refused = FaultPlan::parse(&format!("[[rules]]\n{rule}")).unwrap_err().to_string();
        assert!(refused.contains(words), "{words:?} is missing: {refused}");
    }
    for (text, words) in [
        ("seed = 'x'", "seed: invalid type: string \"x\", expected u64"),
        ("seeds = 4", "seeds: unknown field `seeds`"),
        ("= 4", "the plan is not TOML: TOML parse error at line 1"),
        ("{\"seed\": 4", "the plan is not JSON: EOF"),
        ("rules = 5", "rules: invalid type: integer `5`"),
    ] {
        let refused = FaultPlan::parse(text).unwrap_err().to_string();
        assert!(refused.contains(words), "{words:?} is missing: {refused}");
    }
}
