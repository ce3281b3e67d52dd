//! `cargo xtask kube test`: end-to-end tests on real clusters.
//!
//! A test is a row of the [`table`] and a function in a file of its topic here. Tests that want equal beds
//! share one, in the order of the table, unless a row asks for a bed of its own. A test cleans up what it
//! made on a bed that it shares.

mod addresses;
mod bad_input;
mod bed;
mod claims;
mod cnp;
mod conformance;
mod crds;
mod dual_stack;
mod faults;
mod hold;
mod install;
mod kinds;
mod plain_cni;
mod pods;
mod policies;
mod primary;
mod proofs;
mod secondary;
mod stolen_token;
mod support;
mod table;
mod talk;
mod talkers;
mod traces;

use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};

use self::table::{LONG, TESTS, Test};
use super::bed::Bed;
use super::components::Group;
use super::paths::Cache;
use super::{build, components, knit, machine};

#[derive(clap::Args)]
pub struct Args {
    /// Tests to run: all whose names contain one of these words; without, all but the long ones. Named
    /// alone, `conformance`, `sig-network`, `netpol` and `netpol-primary` are selections of the upstream
    /// tests, `cnp` and `cnp-primary` the conformance suite of ClusterNetworkPolicy
    names: Vec<String>,
    /// Everything there is, for a release: all end-to-end tests, both selections of upstream tests, all fuzz
    /// targets for five minutes each, the tests on another kernel (`cargo xtask kernel-test`), and agents of
    /// an earlier commit replaced under traffic (`cargo xtask upgrade-test`). Knit's image is the static one
    /// that is shipped (`cargo xtask image --release`), which takes a while to build
    #[arg(long, conflicts_with_all = ["names", "list", "here", "keep", "if_possible"])]
    all: bool,
    /// Print their names only
    #[arg(long)]
    list: bool,
    /// Run on the bed that is up, whatever its options are
    #[arg(long)]
    here: bool,
    /// Leave the bed of the last test, or of the first that fails, up
    #[arg(long)]
    keep: bool,
    /// Where this is not root, a bed is up, or something is not installed, say so and succeed: for machines
    /// that cannot do more. Where components can be built, they are
    #[arg(long)]
    if_possible: bool,
    /// Run a test that fails again, on a new bed, and say so: for machines whose load nobody knows
    #[arg(long)]
    again: bool,
    #[command(flatten)]
    upstream: conformance::Upstream,
}

/// How a test ended.
enum Outcome {
    Passed,
    Skipped(String),
    Failed(anyhow::Error),
}

impl Outcome {
    /// A test that cannot run here: a failure where nothing may be skipped.
    fn not_run(why: String, strict: bool) -> Self {
        if strict {
            Self::Failed(anyhow!("KNIT_TEST_STRICT is set, and this test would be skipped: {why}"))
        } else {
            Self::Skipped(why)
        }
    }
}

/// Whether `KNIT_TEST_STRICT` says that nothing may be skipped.
fn is_strict() -> bool {
    std::env::var("KNIT_TEST_STRICT").is_ok_and(|value| !["", "0"].contains(&value.as_str()))
}

pub fn run(args: &Args) -> Result<()> {
    if args.all {
        return run_all(args);
    }
    if let [name] = args.names.as_slice()
        && conformance::is_selection(name)
    {
        if let (true, Some(why)) = (args.if_possible, conformance::impossible(&Cache::find()?)?) {
            return skip("the upstream tests", why);
        }
        let how = conformance::How { here: args.here, keep: args.keep, again: args.again };
        return conformance::run(name, &args.upstream, how);
    }
    if let [name] = args.names.as_slice()
        && let Some(place) = cnp::Place::named(name)
    {
        let how = conformance::How { here: args.here, keep: args.keep, again: false };
        return cnp::run(place, how);
    }
    run_selected(args)
}

/// Our own tests.
fn run_selected(args: &Args) -> Result<()> {
    let wanted = select(&args.names, if args.all || args.list { &[TESTS, LONG] } else { &[TESTS] })?;
    if args.list {
        let names: String = wanted.iter().map(|test| format!("{}\n", test.name)).collect();
        return Ok(knit_output::print(&names)?);
    }
    let cache = Cache::find()?;
    if args.if_possible {
        if let Some(why) = impossible(&cache, &[Group::Core, Group::Peers])? {
            return skip(&format!("all {} end-to-end tests", wanted.len()), why);
        }
        build::build(&cache, &[Group::Core, Group::Peers])?;
    }
    let (start, mut failed, mut skipped, mut retried) = (Instant::now(), Vec::new(), 0, Vec::new());
    // Before any bed is up, which would wait for it: building can take minutes.
    knit::image()?;
    let mut bed: Option<Bed> = if args.here { Some(Bed::open()?) } else { None };
    for (number, test) in wanted.iter().enumerate() {
        eprintln!("[{}/{}] {} ...", number + 1, wanted.len(), test.name);
        let begun = Instant::now();
        let mut outcome = match missing(&cache, test, args)? {
            Some(why) => Outcome::not_run(why, is_strict()),
            None => run_one(test, &mut bed, args.here),
        };
        if let (Outcome::Failed(_), true) = (&outcome, args.again && !args.here) {
            report(test, &outcome, begun.elapsed());
            eprintln!("AGAIN {}, on a new bed", test.name);
            end(&mut bed)?;
            outcome = run_one(test, &mut bed, args.here);
            if matches!(outcome, Outcome::Passed) {
                retried.push(test.name);
                note_retry(test.name)?;
            }
        }
        report(test, &outcome, begun.elapsed());
        match outcome {
            Outcome::Passed => {}
            Outcome::Skipped(why) => {
                skipped += 1;
                note("KNIT_TEST_SKIPS", &format!("{}: {why}", test.name))?;
            }
            Outcome::Failed(_) => {
                failed.push(test.name);
                if args.keep {
                    eprintln!("the bed is left up; `cargo xtask kube down` ends it");
                    bail!("{} failed", test.name);
                }
                // What a failed test leaves behind must not fail the next.
                if !args.here {
                    end(&mut bed)?;
                }
            }
        }
    }
    if !args.here && !args.keep {
        end(&mut bed)?;
    }
    let passed = wanted.len() - failed.len() - skipped;
    eprintln!(
        "{passed} passed, {} failed, {skipped} skipped in {:.0} s",
        failed.len(),
        start.elapsed().as_secs_f64()
    );
    if !retried.is_empty() {
        eprintln!("these had failed once before; look at what they said above: {}", retried.join(", "));
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

/// Every tier, whatever became of the one before it.
fn run_all(args: &Args) -> Result<()> {
    let cache = Cache::find()?;
    build::build(&cache, &[Group::Core, Group::Peers, Group::E2e, Group::Cnp])?;
    // A release is tested as it is shipped; `.ci/run` tests the build that `cargo test` has made already.
    knit::use_release_image()?;
    let upstream = |name| {
        let how = conformance::How { here: false, keep: false, again: args.again };
        conformance::run(name, &args.upstream, how)
    };
    let policies = |place| cnp::run(place, conformance::How { here: false, keep: false, again: false });
    let tiers: [(&str, &dyn Fn() -> Result<()>); 10] = [
        ("end-to-end tests", &|| run_selected(args)),
        ("conformance", &|| upstream("conformance")),
        ("sig-network", &|| upstream("sig-network")),
        ("netpol", &|| upstream("netpol")),
        ("netpol-primary", &|| upstream("netpol-primary")),
        ("cnp", &|| policies(cnp::Place::Default)),
        ("cnp-primary", &|| policies(cnp::Place::Primary)),
        ("fuzz", &|| crate::fuzz::run(&crate::fuzz::Args::all_for(300))),
        ("kernel-test", &|| crate::kernel_test::run(&crate::kernel_test::Args::default())),
        ("upgrade-test", &|| crate::upgrade_test::run(&crate::upgrade_test::Args::default())),
    ];
    let mut failed = Vec::new();
    for (name, tier) in tiers {
        eprintln!("== {name}");
        if let Err(error) = tier() {
            eprintln!("FAIL {name}\n{}", knit_output::report(error.as_ref()));
            failed.push(name);
        }
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

/// Says that something is skipped; fails where `KNIT_TEST_STRICT` says that nothing may be.
fn skip(what: &str, why: &str) -> Result<()> {
    ensure!(!is_strict(), "KNIT_TEST_STRICT is set, and {what} would be skipped: {why}");
    eprintln!("SKIP {what}: {why}");
    note("KNIT_TEST_SKIPS", &format!("{what}: {why}"))
}

/// Notes in the file that `KNIT_TEST_RETRIED` names what passed only when it was run again.
fn note_retry(name: &str) -> Result<()> {
    note("KNIT_TEST_RETRIED", name)
}

fn note(variable: &str, line: &str) -> Result<()> {
    let Some(path) = std::env::var_os(variable) else { return Ok(()) };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
    let written = file.and_then(|mut file| writeln!(file, "{line}"));
    written.with_context(|| format!("cannot write to {}", path.display()))
}

fn end(bed: &mut Option<Bed>) -> Result<()> {
    bed.take().map_or(Ok(()), Bed::down)
}

/// Why no test can run here.
fn impossible(cache: &Cache, groups: &[Group]) -> Result<Option<&'static str>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Some("they need root"));
    }
    if machine::holder()?.is_some() {
        return Ok(Some("a bed is up, and there can be one (`cargo xtask kube down` ends it)"));
    }
    for group in groups {
        if !build::is_built(cache, *group)?
            && let Some(why) = build::missing_tool(true)
        {
            return Ok(Some(why));
        }
    }
    // The key of runc's build tells whether it was built with.
    Ok((!components::seccomp_headers()).then_some(build::NO_SECCOMP))
}

/// The tests that are named, or all of some tables; those with equal beds together.
fn select(names: &[String], unnamed: &[&'static [Test]]) -> Result<Vec<&'static Test>> {
    let tables = if names.is_empty() { unnamed } else { &[TESTS, LONG] };
    let tests = || tables.iter().copied().flatten();
    for name in names {
        ensure!(
            tests().any(|test| test.name.contains(name)),
            "no test has {name:?} in its name; `cargo xtask kube test --list` shows them"
        );
    }
    let named = |test: &&Test| names.is_empty() || names.iter().any(|name| test.name.contains(name));
    let mut wanted: Vec<&Test> = Vec::new();
    for test in tests().filter(named) {
        let like = wanted.iter().rposition(|other| !test.own_bed && !other.own_bed && other.bed == test.bed);
        wanted.insert(like.map_or(wanted.len(), |like| like + 1), test);
    }
    Ok(wanted)
}

/// Why a test cannot run; what is named is built instead.
fn missing(cache: &Cache, test: &Test, args: &Args) -> Result<Option<String>> {
    for group in test.needs {
        if !build::is_built(cache, *group)? {
            if args.names.is_empty() && *group != Group::Core {
                let group = format!("{group:?}").to_lowercase();
                return Ok(Some(format!("{group} is not built (`cargo xtask kube build {group}`)")));
            }
            build::build(cache, &[*group])?;
        }
    }
    Ok(None)
}

fn run_one(test: &Test, bed: &mut Option<Bed>, here: bool) -> Outcome {
    let mut ready = || -> Result<Bed> {
        match bed.take() {
            Some(bed) if here || (*bed.options() == test.bed && !test.own_bed) => Ok(bed),
            Some(bed) => bed.down().and_then(|()| Bed::up(&test.bed)),
            None => Bed::up(&test.bed),
        }
    };
    let ready = match ready() {
        Ok(ready) => ready,
        Err(error) => return Outcome::Failed(error),
    };
    let mut outcome = match (test.run)(&ready).and_then(|()| ready.alive()) {
        Ok(()) => Outcome::Passed,
        Err(error) => Outcome::Failed(error),
    };
    if let Outcome::Failed(error) = outcome {
        let words = match ready.keep_logs(test.name) {
            Ok(path) => format!("logs are kept in {}", path.display()),
            Err(error) => format!("logs could not be kept: {error:#}"),
        };
        outcome = Outcome::Failed(error.context(words));
    }
    if test.own_bed && !here && matches!(outcome, Outcome::Passed) {
        return ready.down().map_or_else(Outcome::Failed, |()| Outcome::Passed);
    }
    *bed = Some(ready);
    outcome
}

fn report(test: &Test, outcome: &Outcome, took: Duration) {
    let took = took.as_secs_f64();
    match outcome {
        Outcome::Passed => eprintln!("PASS {} ({took:.1} s)", test.name),
        Outcome::Skipped(why) => eprintln!("SKIP {}: {why}", test.name),
        Outcome::Failed(error) => {
            eprintln!("FAIL {} ({took:.1} s)\n{}", test.name, knit_output::report(error.as_ref()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_plain() {
        let mut names: Vec<_> = TESTS.iter().chain(LONG).map(|test| test.name).collect();
        assert!(names.iter().all(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_')));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TESTS.len() + LONG.len());
    }

    #[test]
    fn a_skipped_test_fails_where_nothing_may_be_skipped() {
        let why = || "peers is not built".to_owned();
        assert!(matches!(Outcome::not_run(why(), false), Outcome::Skipped(_)));
        let Outcome::Failed(error) = Outcome::not_run(why(), true) else { panic!("it passed for a skip") };
        assert!(error.to_string().contains("peers is not built"), "{error}");
    }

    #[test]
    fn a_word_selects_and_a_wrong_one_is_refused() {
        assert_eq!(select(&["crds".into()], &[TESTS]).unwrap().len(), 1);
        assert_eq!(select(&[], &[TESTS]).unwrap().len(), TESTS.len());
        assert!(select(&["no such test".into()], &[TESTS]).is_err());
    }

    #[test]
    fn a_long_test_runs_when_it_is_named() {
        let is_long = |test: &Test| LONG.iter().any(|long| long.name == test.name);
        assert!(!select(&[], &[TESTS]).unwrap().into_iter().any(is_long));
        assert!(select(&[LONG[0].name.into()], &[TESTS]).unwrap().into_iter().any(is_long));
    }
}
