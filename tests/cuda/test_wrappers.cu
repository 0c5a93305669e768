// test_wrappers.cu - the wrappers of compat.cuh against NVIDIA's tables.
//
// The three tables are the figures "Matrix Fragments for mma.m16n8k16 with floating point type" of the PTX ISA manual
// (.bf16), written down element by element as LANE.INDEX: which lane holds the element, and at which index of its
// fragment. They share nothing with the shim's own formulas.
#include "tests/cuda/rig.h"

#include <string>

using rig::dev;

static const char *const fig_a[16] = { // 16 x 16, a0 .. a7
    "0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1 0.4 0.5 1.4 1.5 2.4 2.5 3.4 3.5",
    "4.0 4.1 5.0 5.1 6.0 6.1 7.0 7.1 4.4 4.5 5.4 5.5 6.4 6.5 7.4 7.5",
    "8.0 8.1 9.0 9.1 10.0 10.1 11.0 11.1 8.4 8.5 9.4 9.5 10.4 10.5 11.4 11.5",
    "12.0 12.1 13.0 13.1 14.0 14.1 15.0 15.1 12.4 12.5 13.4 13.5 14.4 14.5 15.4 15.5",
    "16.0 16.1 17.0 17.1 18.0 18.1 19.0 19.1 16.4 16.5 17.4 17.5 18.4 18.5 19.4 19.5",
    "20.0 20.1 21.0 21.1 22.0 22.1 23.0 23.1 20.4 20.5 21.4 21.5 22.4 22.5 23.4 23.5",
    "24.0 24.1 25.0 25.1 26.0 26.1 27.0 27.1 24.4 24.5 25.4 25.5 26.4 26.5 27.4 27.5",
    "28.0 28.1 29.0 29.1 30.0 30.1 31.0 31.1 28.4 28.5 29.4 29.5 30.4 30.5 31.4 31.5",
    "0.2 0.3 1.2 1.3 2.2 2.3 3.2 3.3 0.6 0.7 1.6 1.7 2.6 2.7 3.6 3.7",
    "4.2 4.3 5.2 5.3 6.2 6.3 7.2 7.3 4.6 4.7 5.6 5.7 6.6 6.7 7.6 7.7",
    "8.2 8.3 9.2 9.3 10.2 10.3 11.2 11.3 8.6 8.7 9.6 9.7 10.6 10.7 11.6 11.7",
    "12.2 12.3 13.2 13.3 14.2 14.3 15.2 15.3 12.6 12.7 13.6 13.7 14.6 14.7 15.6 15.7",
    "16.2 16.3 17.2 17.3 18.2 18.3 19.2 19.3 16.6 16.7 17.6 17.7 18.6 18.7 19.6 19.7",
    "20.2 20.3 21.2 21.3 22.2 22.3 23.2 23.3 20.6 20.7 21.6 21.7 22.6 22.7 23.6 23.7",
    "24.2 24.3 25.2 25.3 26.2 26.3 27.2 27.3 24.6 24.7 25.6 25.7 26.6 26.7 27.6 27.7",
    "28.2 28.3 29.2 29.3 30.2 30.3 31.2 31.3 28.6 28.7 29.6 29.7 30.6 30.7 31.6 31.7",
};
static const char *const fig_b[16] = { // 16 x 8, b0 .. b3
    "0.0 4.0 8.0 12.0 16.0 20.0 24.0 28.0",
    "0.1 4.1 8.1 12.1 16.1 20.1 24.1 28.1",
    "1.0 5.0 9.0 13.0 17.0 21.0 25.0 29.0",
    "1.1 5.1 9.1 13.1 17.1 21.1 25.1 29.1",
    "2.0 6.0 10.0 14.0 18.0 22.0 26.0 30.0",
    "2.1 6.1 10.1 14.1 18.1 22.1 26.1 30.1",
    "3.0 7.0 11.0 15.0 19.0 23.0 27.0 31.0",
    "3.1 7.1 11.1 15.1 19.1 23.1 27.1 31.1",
    "0.2 4.2 8.2 12.2 16.2 20.2 24.2 28.2",
    "0.3 4.3 8.3 12.3 16.3 20.3 24.3 28.3",
    "1.2 5.2 9.2 13.2 17.2 21.2 25.2 29.2",
    "1.3 5.3 9.3 13.3 17.3 21.3 25.3 29.3",
    "2.2 6.2 10.2 14.2 18.2 22.2 26.2 30.2",
    "2.3 6.3 10.3 14.3 18.3 22.3 26.3 30.3",
    "3.2 7.2 11.2 15.2 19.2 23.2 27.2 31.2",
    "3.3 7.3 11.3 15.3 19.3 23.3 27.3 31.3",
};
static const char *const fig_c[16] = { // 16 x 8, c0 .. c3
    "0.0 0.1 1.0 1.1 2.0 2.1 3.0 3.1",
    "4.0 4.1 5.0 5.1 6.0 6.1 7.0 7.1",
    "8.0 8.1 9.0 9.1 10.0 10.1 11.0 11.1",
    "12.0 12.1 13.0 13.1 14.0 14.1 15.0 15.1",
    "16.0 16.1 17.0 17.1 18.0 18.1 19.0 19.1",
    "20.0 20.1 21.0 21.1 22.0 22.1 23.0 23.1",
    "24.0 24.1 25.0 25.1 26.0 26.1 27.0 27.1",
    "28.0 28.1 29.0 29.1 30.0 30.1 31.0 31.1",
    "0.2 0.3 1.2 1.3 2.2 2.3 3.2 3.3",
    "4.2 4.3 5.2 5.3 6.2 6.3 7.2 7.3",
    "8.2 8.3 9.2 9.3 10.2 10.3 11.2 11.3",
    "12.2 12.3 13.2 13.3 14.2 14.3 15.2 15.3",
    "16.2 16.3 17.2 17.3 18.2 18.3 19.2 19.3",
    "20.2 20.3 21.2 21.3 22.2 22.3 23.2 23.3",
    "24.2 24.3 25.2 25.3 26.2 26.3 27.2 27.3",
    "28.2 28.3 29.2 29.3 30.2 30.3 31.2 31.3",
};

struct place {
    int lane, index;
};

static place place_of(const char *row, int col)
{
    place p = { -1, -1 };
    for (int i = 0; i < col; i++)
        row = strchr(row, ' ') + 1;
    if (sscanf(row, "%d.%d", &p.lane, &p.index) != 2)
        exit(2);
    return p;
}

__global__ void one_mma(const unsigned *a, const unsigned *b, const float *c, float *d)
{
    int l = threadIdx.x;
    mma_bf16(d + 4 * l, a + 4 * l, b + 2 * l, c + 4 * l);
}

static void set_half(std::vector<unsigned> &v, size_t word, int half, float f)
{
    v[word] |= (unsigned)rig::to_bf16(f) << (16 * half);
}

static void test_mma()
{
    for (int round = 0; round < 8; round++) {
        std::vector<unsigned> a(128, 0), b(64, 0);
        std::vector<float> c(128), A(256), B(128), C(128);
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 16; j++) { // small integers: products and sums are exact
                A[i * 16 + j] = (float)rig::between(-8, 8);
                place p = place_of(fig_a[i], j);
                set_half(a, p.lane * 4 + p.index / 2, p.index & 1, A[i * 16 + j]);
            }
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                B[i * 8 + j] = (float)rig::between(-8, 8);
                place p = place_of(fig_b[i], j);
                set_half(b, p.lane * 2 + p.index / 2, p.index & 1, B[i * 8 + j]);
                C[i * 8 + j] = (float)rig::between(-100, 100);
                p = place_of(fig_c[i], j);
                c[p.lane * 4 + p.index] = C[i * 8 + j];
            }
        dev<unsigned> da(a), db(b);
        dev<float> dc(c), dd(128);
        LAUNCH(one_mma, dim3(1), dim3(32), 0, (cudaStream_t)0, da.p, db.p, dc.p, dd.p);
        std::vector<float> d = dd.get();
        bool ok = true;
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                float want = C[i * 8 + j];
                for (int k = 0; k < 16; k++)
                    want += A[i * 16 + k] * B[k * 8 + j];
                place p = place_of(fig_c[i], j);
                ok = ok && d[p.lane * 4 + p.index] == want;
            }
        CHECK(ok);
    }
}

// ldmatrix: matrix i's row r is at the address that lane 8 i + r gives. Without .trans, lane l gets of each matrix row
// l / 4 the elements 2 (l % 4) and 2 (l % 4) + 1; with .trans the same of the transposed matrix.
__global__ void all_ldmatrix(const unsigned short *in, unsigned *out)
{
    DYN_SMEM(unsigned short, sm);
    int l = threadIdx.x;
    for (int i = l; i < 32 * 8; i += 32)
        sm[i] = in[i];
    __syncwarp();
    unsigned r4[4], r2[2], rt[2];
    ldm_x4(r4, sm + l * 8);
    ldm_x2(r2, sm + (l & 15) * 8);
    ldm_x2t(rt, sm + (l & 15) * 8);
    for (int i = 0; i < 4; i++)
        out[l * 8 + i] = r4[i];
    for (int i = 0; i < 2; i++) {
        out[l * 8 + 4 + i] = r2[i];
        out[l * 8 + 6 + i] = rt[i];
    }
}

static void test_ldmatrix()
{
    std::vector<unsigned short> in(256); // element = 256 * matrix + 16 * row + column
    for (int i = 0; i < 256; i++)
        in[i] = (unsigned short)((i / 64) * 256 + (i % 64) / 8 * 16 + i % 8);
    dev<unsigned short> d(in);
    dev<unsigned> out(256);
    LAUNCH(all_ldmatrix, dim3(1), dim3(32), 512, (cudaStream_t)0, d.p, out.p);
    std::vector<unsigned> r = out.get();
    // By hand, from the figure of .m8n8: lanes 0, 1, 5, 31.
    const struct {
        int lane, row, col;
    } spot[] = { { 0, 0, 0 }, { 1, 0, 2 }, { 5, 1, 2 }, { 31, 7, 6 } };
    for (auto s : spot) {
        for (unsigned m = 0; m < 4; m++)
            CHECK(r[s.lane * 8 + m] == ((m * 256 + s.row * 16 + s.col) | (m * 256 + s.row * 16 + s.col + 1) << 16));
        for (unsigned m = 0; m < 2; m++) {
            CHECK(r[s.lane * 8 + 4 + m] == ((m * 256 + s.row * 16 + s.col) | (m * 256 + s.row * 16 + s.col + 1) << 16));
            CHECK(r[s.lane * 8 + 6 + m] == ((m * 256 + s.col * 16 + s.row) | (m * 256 + (s.col + 1) * 16 + s.row) << 16));
        }
    }
}

// Two groups of copies: after waiting for all but one, the first has come; the second only after the last wait.
__global__ void two_copies(const float4 *in, float4 *out)
{
    DYN_SMEM(float4, sm);
    int l = threadIdx.x;
    cp16(sm + l, in + l);
    cp_commit();
    cp16(sm + 32 + l, in + 32 + l);
    cp_commit();
    cp_wait<1>();
    out[l] = sm[l];
    cp_wait<0>();
    out[32 + l] = sm[32 + l];
}

static void test_cp_async()
{
    std::vector<float4> in(64);
    for (int i = 0; i < 64; i++)
        in[i] = { (float)i, (float)i + 0.25f, (float)-i, 1.0f };
    dev<float4> d(in), out(64);
    LAUNCH(two_copies, dim3(1), dim3(32), 64 * 16, (cudaStream_t)0, d.p, out.p);
    std::vector<float4> r = out.get();
    CHECK(memcmp(r.data(), in.data(), 64 * sizeof(float4)) == 0);
}

int main()
{
    test_mma();
    test_ldmatrix();
    test_cp_async();
    return rig::done();
}
