// What the machine offers beyond C++: conversions, tensor cores, asynchronous copies. Everything else is
// written on top of these functions.

typedef unsigned short bf16;  // the 16-bit pattern
typedef unsigned int u32;
typedef long long i64;
typedef u32 shared_address;

__device__ __forceinline__ bf16 to_bf16(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return y;
}

// Two values in one register, `low` in the low half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ shared_address address_of_shared(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// Four 8x8 matrices; each lane gives the address of one row of 16 bytes.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// The same, each matrix transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], shared_address row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// c[16, 8] += a[16, 16] b[16, 8], float32 sums.
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 16 bytes to shared memory.
__device__ __forceinline__ void copy_async(shared_address to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// 16 bytes to shared memory, zeros unless `valid`.
__device__ __forceinline__ void copy_async(shared_address to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `LEFT` groups of copies of this thread are under way.
template <int LEFT>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ---- Products of a warpgroup, four warps in step (Hopper): asynchronous, operands in shared memory.

// A matrix of bf16 in shared memory as the tensor cores read it: panels of 64 elements, 128 bytes a row, the
// 16-byte pieces of a row permuted by the row's number modulo 8, panels at multiples of 1024 bytes.
typedef unsigned long long operand;

// `panel` is the distance of two panels in bytes.
__device__ __forceinline__ operand describe(shared_address at, u32 panel) {
    const operand GROUP_BYTES = 1024, PERMUTED = 1;  // distance of 8 rows
    return (operand)(at >> 4) | (operand)(panel >> 4) << 16 | (GROUP_BYTES >> 4) << 32 | PERMUTED << 62;
}

__device__ __forceinline__ shared_address align_panels(shared_address at) { return (at + 1023u) & ~1023u; }

// What this thread wrote to shared memory is seen by products after the next barrier.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What this thread wrote to registers is seen by the products that follow.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `LEFT` committed groups are under way.
template <int LEFT>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Ties a register to this place, so that its uses stay on their side of the products.
__device__ __forceinline__ void settle(float& x) { asm volatile("" : "+f"(x)::"memory"); }

#define SUMS4(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define SUMS16(c, i) SUMS4(c[i]), SUMS4(c[i + 1]), SUMS4(c[i + 2]), SUMS4(c[i + 3])
#define NAMES32                                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "   \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define NAMES64                                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "   \
    "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "    \
    "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "    \
    "%59, %60, %61, %62, %63}"

// c[64, 64] (+)= a[64, 16] b[64, 16]^T, both rows in shared memory.
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], operand a, operand b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES32
                 ", %32, %33, p, 1, 1, 0, 0;}"
                 : SUMS16(c, 0), SUMS16(c, 4)
                 : "l"(a), "l"(b), "r"(add));
}

// c[64, 128] (+)= a[64, 16] b[128, 16]^T
__device__ __forceinline__ void multiply_rows(float (&c)[16][4], operand a, operand b, int add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " NAMES64
                 ", %64, %65, p, 1, 1, 0, 0;}"
                 : SUMS16(c, 0), SUMS16(c, 4), SUMS16(c, 8), SUMS16(c, 12)
                 : "l"(a), "l"(b), "r"(add));
}

// c[64, columns] += a[64, 16] b[16, columns], a in registers, b's rows in shared memory.
__device__ __forceinline__ void multiply_columns(float (&c)[8][4], const u32 (&a)[4], operand b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " NAMES32
                 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : SUMS16(c, 0), SUMS16(c, 4)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply_columns(float (&c)[16][4], const u32 (&a)[4], operand b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " NAMES64
                 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : SUMS16(c, 0), SUMS16(c, 4), SUMS16(c, 8), SUMS16(c, 12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
