//! No dead link: in the documentation as it is built, and in the texts as the repository's page shows them.
//!
//! ```text
//! cargo test --test links -- --ignored
//! ```

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use support::examples::root;

/// Where docs.rs will have the documentation, and the files of the package.
const DOCS: &str = "https://docs.rs/optimisers/latest/";
const FILES: &str = "https://docs.rs/crate/optimisers/latest/source/";

/// A page: where its links go, and what links can go to in it.
#[derive(Default)]
struct Page {
    links: Vec<String>,
    anchors: BTreeSet<String>,
    /// References without a definition.
    undefined: Vec<String>,
}

impl Page {
    fn of_html(text: &str) -> Self {
        let mut page = Page::default();
        let mut is_script = false;
        for tag in text.split('<').skip(1) {
            // What a script writes into the page are no links yet.
            let was_script = is_script;
            is_script = tag.starts_with("script") || is_script && !tag.starts_with("/script");
            if was_script {
                continue;
            }
            for (name, value) in attributes(tag) {
                match name {
                    "href" => page.links.push(unescaped(value)),
                    "src" if tag.starts_with("img") => page.links.push(unescaped(value)),
                    "id" => _ = page.anchors.insert(unescaped(value)),
                    _ => {}
                }
            }
        }
        page
    }

    fn of_markdown(text: &str) -> Self {
        let mut page = Page::default();
        let (mut defined, mut used, mut fence) = (BTreeSet::new(), Vec::new(), None);
        for line in text.lines() {
            let start = line.trim_start();
            match fence {
                Some(mark) if start.starts_with(mark) => fence = None,
                Some(_) => continue,
                None => fence = ["```", "~~~"].into_iter().find(|mark| start.starts_with(mark)),
            }
            if fence.is_some() || start.starts_with("```") {
                continue;
            }
            if let Some(heading) = line.strip_prefix('#') {
                page.anchors.insert(slug(heading.trim_start_matches('#').trim()));
            }
            if let Some((label, target)) = line.strip_prefix('[').and_then(|line| line.split_once("]: ")) {
                defined.insert(label.to_lowercase());
                page.links.push(target.trim().to_string());
                continue;
            }
            for (at, _) in line.match_indices("](").filter(|(at, _)| !in_code(line, *at)) {
                let target = line[at + 2..].split([')', ' ']).next().unwrap_or_default();
                page.links.push(target.to_string());
            }
            let full = line.match_indices("][").filter(|(at, _)| !in_code(line, *at));
            used.extend(full.filter_map(|(at, _)| Some(line[at + 2..].split_once(']')?.0.to_lowercase())));
            let code = line.match_indices("[`").filter(|(at, _)| !in_code(line, *at));
            // A code span between brackets and nothing behind them: a name, which is its own label.
            let names = code.filter_map(|(at, _)| line[at + 1..].split_once("`]"));
            used.extend(
                names
                    .filter(|(_, rest)| !rest.starts_with(['(', '[']))
                    .map(|(name, _)| format!("{name}`").to_lowercase()),
            );
        }
        page.undefined = used
            .into_iter()
            .filter(|label| !defined.contains(label))
            .collect();
        page
    }
}

/// The names and values in a tag, up to its end.
fn attributes(mut tag: &str) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    while let Some(equals) = tag.find(['=', '>']).filter(|at| tag.as_bytes()[*at] == b'=') {
        let name = tag[..equals].rsplit([' ', '\n']).next().unwrap_or_default();
        let rest = &tag[equals + 1..];
        let quoted = rest.chars().next().filter(|mark| matches!(mark, '"' | '\''));
        let (value, behind) = match quoted {
            Some(mark) => rest[1..].split_once(mark).unwrap_or((&rest[1..], "")),
            None => rest.split_at(rest.find([' ', '>', '\n']).unwrap_or(rest.len())),
        };
        found.push((name, value));
        tag = behind;
    }
    found
}

fn unescaped(text: &str) -> String {
    let marks = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#39;", "'"),
        ("&#x27;", "'"),
        ("&amp;", "&"),
    ];
    marks
        .into_iter()
        .fold(text.to_string(), |text, (from, to)| text.replace(from, to))
}

/// With `%41` as `A`.
fn decoded(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part
            .get(..2)
            .and_then(|digits| u8::from_str_radix(digits, 16).ok())
        {
            Some(byte) => bytes.extend([&[byte], &part.as_bytes()[2..]].concat()),
            None => bytes.extend([b"%", part.as_bytes()].concat()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The anchor that the repository's page gives a heading.
fn slug(heading: &str) -> String {
    let kept = heading
        .chars()
        .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// Whether a place in a line is inside a code span: behind an odd number of its marks.
fn in_code(line: &str, at: usize) -> bool {
    line[..at].matches('`').count() % 2 == 1
}

/// `a/b/../c` as `a/c`.
fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut plain, part| {
        if part == Component::ParentDir {
            _ = plain.pop()
        } else {
            plain.push(part)
        }
        plain
    })
}

/// What links can go to.
struct Places {
    repository: PathBuf,
    /// The folder of the built documentation.
    docs: PathBuf,
    /// The files of the package.
    packed: BTreeSet<String>,
    read: RefCell<HashMap<PathBuf, Rc<Page>>>,
}

impl Places {
    fn page(&self, path: &Path) -> Rc<Page> {
        let read = || {
            let text = fs::read_to_string(path).unwrap_or_default();
            Rc::new(if path.extension().is_some_and(|name| name == "md") {
                Page::of_markdown(&text)
            } else {
                Page::of_html(&text)
            })
        };
        self.read
            .borrow_mut()
            .entry(path.to_path_buf())
            .or_insert_with(read)
            .clone()
    }

    /// Why a link of a page leads nowhere.
    fn why_dead(&self, page: &Path, link: &str) -> Option<&'static str> {
        let (address, anchor) = link.split_once('#').unwrap_or((link, ""));
        let address = address.split('?').next().unwrap_or_default();
        if let Some(file) = address.strip_prefix(FILES) {
            let is_there =
                |packed: &String| packed == file || file.ends_with('/') && packed.starts_with(file);
            return (!self.packed.iter().any(is_there)).then_some("is no file of the package");
        }
        let mut target = match address.strip_prefix(DOCS) {
            Some(path) => self.docs.join(decoded(path)),
            None if address.starts_with("https://docs.rs/optimisers") => {
                return Some("is not below that of the latest version");
            }
            None if address.contains("://")
                || address.starts_with("data:")
                || address.starts_with("mailto:") =>
            {
                return None;
            }
            None if address.is_empty() => page.to_path_buf(),
            None => plain(&page.with_file_name(decoded(address))),
        };
        if target.starts_with(&self.docs) && target.is_dir() {
            target.push("index.html");
        }
        if !target.exists() {
            return Some("is not there");
        }
        let anchors = &self.page(&target).anchors;
        // Of lines in a source, a script of the page makes a range.
        let is_there =
            |anchor: &str| anchors.contains(anchor) || anchor.split('-').all(|line| anchors.contains(line));
        // A browser looks for an anchor as it is written, and then for the decoded one.
        (!anchor.is_empty() && !is_there(anchor) && !is_there(&decoded(anchor)))
            .then_some("has no such anchor")
    }

    /// Every dead link of a page, and every reference that it does not define.
    fn dead_links(&self, path: &Path) -> BTreeSet<String> {
        let page = self.page(path);
        let name = path
            .strip_prefix(&self.docs)
            .or(path.strip_prefix(&self.repository))
            .unwrap_or(path)
            .display();
        let dead = page
            .links
            .iter()
            .filter_map(|link| Some(format!("{name}: {link} {}", self.why_dead(path, link)?)));
        dead.chain(
            page.undefined
                .iter()
                .map(|label| format!("{name}: [{label}] is not defined")),
        )
        .collect()
    }
}

/// All files below a folder with this ending.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path());
    let (folders, files_here): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let here = files_here
        .into_iter()
        .filter(|path| path.extension().is_some_and(|name| name == ending));
    here.chain(folders.iter().flat_map(|folder| files(folder, ending)))
        .collect()
}

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(root())
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("a text")
}

#[test]
#[ignore = "builds the documentation"]
fn no_link_is_dead() {
    let test = std::env::current_exe().expect("the path of this test");
    let target = test
        .ancestors()
        .nth(3)
        .expect("the folder of all profiles")
        .to_path_buf();
    // What is no longer made must not keep a link alive.
    let docs = target.join("doc");
    for folder in [docs.join("optimisers"), docs.join("src/optimisers")] {
        if folder.exists() {
            fs::remove_dir_all(folder).expect("an old folder goes");
        }
    }
    let target = target.to_str().expect("a path in UTF-8");
    cargo(&[
        "doc",
        "--quiet",
        "--no-deps",
        "--package",
        "optimisers",
        "--features",
        "config,torch",
        "--target-dir",
        target,
    ]);
    let packed = cargo(&["package", "--list", "--allow-dirty", "--package", "optimisers"]);
    let packed = packed.lines().map(|line| line.replace('\\', "/")).collect();
    let repository = root().canonicalize().expect("the repository");
    let places = Places {
        docs,
        packed,
        read: RefCell::default(),
        repository,
    };

    let built = ["optimisers", "src/optimisers"]
        .into_iter()
        .flat_map(|folder| files(&places.docs.join(folder), "html"));
    let texts = [
        "README.md",
        "CONTRIBUTING.md",
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "tests/TRAPS.md",
        "src/many_machines.md",
    ];
    let texts = texts.map(|name| places.repository.join(name));
    let folders = ["benches", "examples/data", "src/engine", "src/guide", "src/rules"]
        .map(|folder| places.repository.join(folder));
    let pages: Vec<PathBuf> = built
        .chain(texts)
        .chain(folders.iter().flat_map(|folder| files(folder, "md")))
        .collect();
    assert!(pages.len() > 300, "{} pages", pages.len());
    let dead: BTreeSet<String> = pages.iter().flat_map(|page| places.dead_links(page)).collect();
    let list: Vec<&str> = dead.iter().map(String::as_str).collect();
    assert!(
        list.is_empty(),
        "{} links of {} pages are dead:\n{}",
        list.len(),
        pages.len(),
        list.join("\n")
    );
}

/// The bytes in base64.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |three: &[u8]| {
        let number = (0..3).fold(0, |number, i| {
            number << 8 | usize::from(*three.get(i).unwrap_or(&0))
        });
        let digit = |i: usize| {
            if i <= three.len() {
                char::from(DIGITS[number >> (18 - 6 * i) & 63])
            } else {
                '='
            }
        };
        (0..4).map(digit).collect::<String>()
    };
    bytes.chunks(3).map(group).collect()
}

/// docs.rs has no files for README's picture, so the documentation has its numbers.
#[test]
fn the_documentation_has_the_picture_of_readme() {
    let folder = root().join("examples/digits");
    let picture = fs::read(folder.join("losses.png")).expect("the picture");
    assert!(picture.len() < 60_000, "{} bytes", picture.len());
    let definition = fs::read_to_string(folder.join("losses.md")).expect("the definition");
    let expected = format!("[losses]: data:image/png;base64,{}\n", base64(&picture));
    assert!(
        definition == expected,
        "examples/digits/losses.md should be\n{expected}"
    );
}

#[test]
fn a_dead_link_is_found() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(&path, text).expect("a file");
        path
    };
    let html = write(
        "doc/optimisers/index.html",
        r##"<a id=1 href="struct.A.html">A</a> <a href="struct.A.html#method.a&amp;b">a</a> <a href=#1>1</a> <a href="#1-1">1</a>
        <a href="struct.B.html">B</a> <a href="struct.A.html#method.c">c</a> <img src="losses.png"> <a href="https://docs.rs/rayon">rayon</a>"##,
    );
    write("doc/optimisers/struct.A.html", "<section id=\"method.a&amp;b\">");
    let text = write(
        "README.md",
        "# A heading, with `code`\n[a](README.md) `[no](link)` [`A`] [a][b] [h](#a-heading-with-code) [`a`](#nothing) [`B`] [b][c]\n\
         ```\n[no](link)\n```\n[`a`]: https://docs.rs/optimisers/latest/optimisers/struct.A.html\n\
         [b]: https://docs.rs/optimisers/latest/optimisers/struct.B.html\n[d]: https://docs.rs/optimisers/0.1/\n\
         [e]: https://docs.rs/crate/optimisers/latest/source/src/lib.rs\n[f]: https://docs.rs/crate/optimisers/latest/source/tests/links.rs\n",
    );
    let places = Places {
        repository: folder.path().to_path_buf(),
        docs: folder.path().join("doc"),
        packed: BTreeSet::from(["src/lib.rs".to_string()]),
        read: RefCell::default(),
    };
    let expected = [
        "optimisers/index.html: losses.png is not there",
        "optimisers/index.html: struct.A.html#method.c has no such anchor",
        "optimisers/index.html: struct.B.html is not there",
    ];
    assert_eq!(places.dead_links(&html).into_iter().collect::<Vec<_>>(), expected);
    let expected = [
        "README.md: #nothing has no such anchor",
        "README.md: [`b`] is not defined",
        "README.md: [c] is not defined",
        "README.md: https://docs.rs/crate/optimisers/latest/source/tests/links.rs is no file of the package",
        "README.md: https://docs.rs/optimisers/0.1/ is not below that of the latest version",
        "README.md: https://docs.rs/optimisers/latest/optimisers/struct.B.html is not there",
    ];
    assert_eq!(places.dead_links(&text).into_iter().collect::<Vec<_>>(), expected);
}
