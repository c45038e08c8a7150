import json,sys
for f in sys.argv[1:]:
    d=json.load(open(f))
    print("#####",f)
    for i,c in enumerate(d["cells"]):
        o=sum(len(json.dumps(x)) for x in c.get("outputs",[]))
        print(f"-- {i} {c['cell_type'][:4]} {c['id']} out={o}" if c['cell_type']=='code' else f"-- {i} md {c['id']}")
        print("".join(c["source"]))
