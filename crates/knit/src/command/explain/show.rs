//! A verdict for people and for scripts.

use knit_output::{Cell, Table, Tone};
use knit_policy::model::{Action, Direction};
use knit_policy::verdict::{Flow, Reason, RuleOutcome, Side, Verdict};
use serde::Serialize;

use super::party::Party;

/// What policies say about one connection, in one address family.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explained {
    /// Whether Knit enforces policies in the Network, as its spec says.
    enforced: bool,
    allowed: bool,
    network: String,
    from: End,
    to: End,
    traffic: String,
    egress: SideRow,
    ingress: SideRow,
    #[serde(skip)]
    itself: bool,
}

#[derive(Debug, Serialize)]
struct End {
    name: String,
    address: String,
}

/// What one side says.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct SideRow {
    allowed: bool,
    reason: String,
    /// The rule that decided, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<usize>,
    /// The endpoint of a cluster service that was judged in its place.
    #[serde(skip_serializing_if = "Option::is_none")]
    endpoint: Option<String>,
    tiers: Vec<TierRow>,
}

#[derive(Debug, Serialize)]
struct TierRow {
    tier: &'static str,
    decision: String,
    rules: Vec<RuleRow>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RuleRow {
    policy: String,
    /// Its place in the list; a policy without rules has a row all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    action: Option<String>,
    matched: bool,
    result: &'static str,
}

// === impl Explained ===

impl Explained {
    /// Whether Knit enforces policies there.
    pub fn is_enforced(&self) -> bool {
        self.enforced
    }

    /// The Network.
    pub fn network(&self) -> &str {
        &self.network
    }

    pub fn new(from: &Party, to: &Party, flow: &Flow, verdict: &Verdict, enforced: bool) -> Self {
        let end = |party: &Party, address: std::net::IpAddr| End {
            name: party.to_string(),
            address: address.to_string(),
        };
        Self {
            enforced,
            allowed: verdict.allowed(),
            network: flow.network.to_string(),
            from: end(from, flow.source),
            to: end(to, flow.destination),
            traffic: flow.traffic.to_string(),
            egress: SideRow::new(&verdict.egress),
            ingress: SideRow::new(&verdict.ingress),
            itself: flow.source == flow.destination,
        }
    }

    fn sides(&self) -> [(Direction, &SideRow); 2] {
        [(Direction::Egress, &self.egress), (Direction::Ingress, &self.ingress)]
    }
}

// === impl SideRow ===

impl SideRow {
    fn new(side: &Side) -> Self {
        let by = match &side.reason {
            Reason::Rule(by) => Some(by),
            _ => None,
        };
        let tiers = side.tiers.iter().filter(|t| !t.policies.is_empty()).map(|tier| TierRow {
            tier: tier.tier,
            decision: tier.decision.map_or("nothing".to_owned(), |d: Action| d.to_string()),
            rules: tier
                .policies
                .iter()
                .flat_map(|policy| {
                    let name = policy.policy.to_string();
                    let none = policy.rules.is_empty().then(|| RuleRow {
                        policy: name.clone(),
                        rule: None,
                        name: None,
                        action: None,
                        matched: false,
                        result: "no rules: it isolates and allows nothing",
                    });
                    let rules = policy.rules.iter().map(move |rule| RuleRow {
                        policy: name.clone(),
                        rule: Some(rule.index),
                        name: rule.name.as_deref().map(str::to_owned),
                        action: Some(rule.action.to_string()),
                        matched: rule.outcome == RuleOutcome::Matched,
                        result: match rule.outcome {
                            RuleOutcome::Matched => "matches",
                            RuleOutcome::NoPeer => "no peer matches",
                            RuleOutcome::NoPort => "a peer matches, no port does",
                            RuleOutcome::NotReached => "not reached",
                        },
                    });
                    none.into_iter().chain(rules)
                })
                .collect(),
        });
        Self {
            allowed: side.allowed,
            reason: side.reason.to_string(),
            policy: by.map(|by| by.policy.to_string()),
            rule: by.map(|by| by.index),
            endpoint: side.endpoint.map(|e| std::net::SocketAddr::new(e.address, e.port).to_string()),
            tiers: tiers.collect(),
        }
    }
}

/// Words, and a table of rules where there are any.
pub fn text(all: &[Explained]) -> String {
    let mut text = String::new();
    for (index, one) in all.iter().enumerate() {
        let word = |allowed: bool| if allowed { "allowed" } else { "denied" };
        if index > 0 {
            text.push('\n');
        }
        let end = |end: &End| match end.name == end.address {
            true => end.address.clone(),
            false => format!("{} ({})", end.name, end.address),
        };
        text += &format!(
            "{}: {} to {}, {}, in Network {}\n",
            word(one.allowed),
            end(&one.from),
            end(&one.to),
            one.traffic,
            one.network
        );
        for (direction, side) in one.sides() {
            let of = if direction == Direction::Egress { &one.from.name } else { &one.to.name };
            text += &format!("  {direction} of {of}: {}: {}\n", word(side.allowed), side.reason);
            if let Some(endpoint) = &side.endpoint {
                text += &format!("    evaluated as its endpoint {endpoint} (rule 38)\n");
            }
        }
        if one.itself {
            text += "  Traffic from a pod to its own address never leaves it; this is about its \
            path through a Service (rule 28).\n";
        }
        if one.sides().iter().any(|(_, side)| !side.tiers.is_empty()) {
            text += &format!("\n{}\n", rules(std::slice::from_ref(one)));
        }
    }
    text
}

/// Every rule that was asked, in the order in which it was.
pub fn rules(all: &[Explained]) -> Table {
    let mut table = Table::new(&["SIDE", "TIER", "POLICY", "RULE", "ACTION", "RESULT"]);
    for (direction, side) in all.iter().flat_map(Explained::sides) {
        for tier in &side.tiers {
            for rule in &tier.rules {
                let number = rule.rule.map(|n| n.to_string()).unwrap_or_default();
                let tone = match (rule.matched, rule.action.as_deref()) {
                    (true, Some("accept")) => Tone::Good,
                    (true, Some("deny")) => Tone::Bad,
                    (true, _) => Tone::Warning,
                    (false, _) => Tone::Plain,
                };
                table.row([
                    direction.to_string().into(),
                    tier.tier.into(),
                    rule.policy.as_str().into(),
                    rule.name.as_ref().map_or(number.clone(), |name| format!("{number} ({name})")).into(),
                    rule.action.clone().unwrap_or_default().into(),
                    Cell::new(rule.result, tone),
                ]);
            }
        }
    }
    table
}
