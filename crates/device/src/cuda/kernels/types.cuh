// Types that all kernels share.

#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 THREADS = 256;
