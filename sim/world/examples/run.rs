fn main() {
    let args: Vec<String> = std::env::args().collect();
    let from: u64 = args[1].parse().unwrap();
    let to: u64 = args.get(2).map_or(from + 1, |a| a.parse().unwrap());
    let readable = args.get(3).is_some();
    std::panic::set_hook(Box::new(|_| {}));
    let (mut bad, mut sum) = (0, baton_world::Counts::default());
    for seed in from..to {
        let o = baton_world::run(seed, readable);
        if readable {
            for l in &o.lines {
                println!("{l}");
            }
        }
        if let Some(f) = &o.failure {
            bad += 1;
            if bad < 15 {
                println!("{seed}: {}", &f[..f.len().min(400)]);
            }
        }
        if to - from == 1 {
            println!("{:?} {:x}", o.counts, o.hash);
        }
        sum.faults += o.counts.faults;
        sum.link_faults += o.counts.link_faults;
        sum.bytes += o.counts.bytes;
        sum.moves += o.counts.moves;
        sum.actions += o.counts.actions;
        sum.deaths += o.counts.deaths;
        sum.simulated += o.counts.simulated;
    }
    println!("{bad} failed of {}; {sum:?}", to - from);
}
