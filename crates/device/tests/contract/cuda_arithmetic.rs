//! The arithmetic of each rule's CUDA file against the rule's own, without a GPU: a C++ compiler makes a program of it
//! in which every intrinsic is the plain operation. What surrounds the arithmetic in a kernel needs a GPU to be tested.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use forebay_device::kernel::uniform_element;
use forebay_device::update::{MAX_COLUMNS, MAX_SCALARS};

use crate::written::{groups, rules};

/// Reads records from standard input and writes weight and columns of each to standard output.
const PROGRAM: &str = r#"
#include <cmath>
#include <cstdio>
#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __grid_constant__
#define asm(...)
static float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return std::sqrt(a); }
static float __uint_as_float(unsigned bits) { float x; __builtin_memcpy(&x, &bits, 4); return x; }
static unsigned __float_as_uint(float x) { unsigned bits; __builtin_memcpy(&bits, &x, 4); return bits; }
static struct { unsigned x; } blockIdx, threadIdx;
#include "update.cuh"
#undef UPDATE_KERNELS
#define UPDATE_KERNELS(name, Rule) using Written = Rule;
#include RULE_FILE
struct Record { float weight, grad, state[MAX_COLUMNS]; u32 kept, position; Scalars scalars; };
int main() {
    Record r;
    while (std::fread(&r, sizeof r, 1, stdin) == 1) {
        Written::update(r.weight, r.grad, r.state, r.kept, r.scalars, r.position);
        std::fwrite(&r.weight, 4, 1, stdout);
        std::fwrite(r.state, sizeof r.state, 1, stdout);
    }
}
"#;

/// The results of one element: weight and columns.
type Results = [f32; 1 + MAX_COLUMNS];

fn bits(results: Results) -> [u32; 1 + MAX_COLUMNS] {
    // The payload of a NaN is free.
    results.map(|value| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() })
}

#[test]
fn cuda_files_have_the_arithmetic_of_their_rules() {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/kernels");
    if !kernels.is_dir() || Command::new("c++").arg("--version").output().is_err() {
        eprintln!("not tested: there is no C++ compiler here, or not the source");
        return;
    }
    let folder = std::env::temp_dir().join(format!("forebay-cuda-arithmetic-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for rule in rules() {
        let (source, program) = (folder.join(format!("{}.cpp", rule.name)), folder.join(rule.name));
        std::fs::write(&source, format!("#define RULE_FILE \"{}.cu\"\n{PROGRAM}", rule.name)).unwrap();
        let compiled = Command::new("c++")
            .args(["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-I"])
            .args([&kernels, &source])
            .arg("-o")
            .arg(&program)
            .output()
            .unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let (mut records, mut expected) = (Vec::new(), Vec::new());
        for (number, group) in groups(rule).iter().enumerate() {
            let s = group.scalars();
            // Across the borders of blocks of 512, in which Adam rounds differently.
            for position in (0..4096u32).step_by(61).chain(500..530) {
                let pick = |operand: u64, low, high| {
                    uniform_element(100 * number as u64 + operand, u64::from(position), low, high)
                };
                let weight = pick(0, -2.0, 2.0);
                // Every other gradient cancels most of the decay, so that its last bits show.
                let grad = if position % 2 == 0 { pick(1, -1.0, 1.0) } else { weight * -0.13 * pick(1, 0.999, 1.001) };
                let mut state = [pick(2, -0.3, 0.3), pick(3, 0.0, 0.1), pick(4, 0.0, 0.1)];
                for (column, value) in state.iter_mut().enumerate() {
                    *value *= f32::from(u8::from(group.kept & 1 << column != 0));
                }
                [weight, grad].iter().chain(&state).for_each(|value| records.extend(value.to_ne_bytes()));
                [group.kept, position].iter().for_each(|number| records.extend(number.to_ne_bytes()));
                s.values.iter().for_each(|value| records.extend(value.to_ne_bytes()));
                [s.flags, 0].iter().for_each(|number| records.extend(number.to_ne_bytes()));
                let new = (rule.element)(weight, grad, &mut state, group.kept, &s, u64::from(position));
                expected.push((group.kept, [new, state[0], state[1], state[2]]));
            }
        }
        let mut child = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        // From a thread: the program writes before it has read everything.
        let writer = std::thread::spawn(move || input.write_all(&records).unwrap());
        let output = child.wait_with_output().unwrap().stdout;
        writer.join().unwrap();
        let found = output.chunks_exact(size_of::<Results>()).map(|record| {
            let value = |i: usize| f32::from_ne_bytes(record[4 * i..4 * i + 4].try_into().unwrap());
            std::array::from_fn(value)
        });
        let found: Vec<Results> = found.collect();
        assert_eq!(found.len(), expected.len(), "{rule:?}");
        for (i, (found, (kept, expected))) in found.into_iter().zip(expected).enumerate() {
            // Columns that are not there have no value.
            let there = |results: Results| {
                std::array::from_fn(|i| if i == 0 || kept & 1 << (i - 1) != 0 { results[i] } else { 0.0 })
            };
            assert_eq!(bits(there(found)), bits(there(expected)), "{rule:?}, record {i}: {found:?} and {expected:?}");
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(MAX_SCALARS, 8, "the record above has room for these");
}
